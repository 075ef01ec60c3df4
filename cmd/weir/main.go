// Command weir meters and throttles API traffic: gateways, aggregator, alerter and the tools around them in one binary.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/text"
)

// Exit codes.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitUnreachable = 3
	exitDegraded    = 4
)

// usageError is a mistake on the command line.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// What a command may find that has an exit code of its own.
var (
	errDegraded    = errors.New("degraded") // it works, but not as it should
	errUnreachable = errors.New("unreachable")
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(execute(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

func execute(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	var wrong error // found by the help, which cannot return it
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if words := cmd.Flags().Args(); len(words) > 0 {
			if wrong = cmd.ValidateArgs(words); wrong != nil {
				return
			}
		}
		help(cmd, args)
	})
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		err = wrong
	}
	if err == nil {
		return exitOK
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		fmt.Fprintln(stderr, "weir: interrupted")
		return exitFailed
	}
	fmt.Fprintf(stderr, "weir: %s\n", text.Lines(err.Error()))
	switch {
	case errors.As(err, new(usageError)):
		fmt.Fprintf(stderr, "Try '%s --help'.\n", cmd.CommandPath())
		return exitUsage
	case errors.Is(err, errDegraded):
		return exitDegraded
	case errors.Is(err, errUnreachable), app.Unreachable(err):
		return exitUnreachable
	}
	return exitFailed
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "weir",
		Short: "Meter and throttle API traffic: local token buckets at the gateways, one limit for all of them",
		Long: `weir puts token buckets in front of an API and keeps one limit over many gateways.
Gateways decide locally; an aggregator reconciles the counts in Redis and keeps the history in ClickHouse;
an alerter wakes on-call. 'weir up' runs all of it on embedded servers.

Standard output is data, standard error is talk. Exit codes: 0 ok, 1 failed, 2 usage, 3 a server is unreachable, 4 degraded.`,
		Example:       "  weir up --load\n  weir simulate --log access.log.gz --policy policy.yaml\n  weir usage top --last 1h",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          known,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetHelpCommand(&cobra.Command{
		Use:     "help [COMMAND]",
		Short:   "Help about a command",
		Example: "  weir help usage top",
		RunE: func(_ *cobra.Command, args []string) error {
			cmd, rest, err := root.Find(args)
			if err != nil {
				return usageError{err}
			}
			if err := known(cmd, rest); err != nil {
				return err
			}
			return cmd.Help()
		},
	})
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(upCommand(), gatewayCommand(), aggregatorCommand(), alerterCommand(), migrateCommand(), checkCommand(),
		usageCommand(), historyCommand(), dlqCommand(), simulateCommand(), replayCommand(), loadCommand(), benchCommand(), doctorCommand(), versionCommand())
	return root
}

// known refuses a word that should have been a command.
func known(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s has no command %q", cmd.CommandPath(), args[0])
	}
	return nil
}

// noArgs refuses arguments with a usage error that names the first one.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s takes no argument %q", cmd.CommandPath(), args[0])
	}
	return nil
}
