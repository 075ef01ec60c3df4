package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/text"
)

func doctorCommand() *cobra.Command {
	var s servers
	var timeout time.Duration
	var out output
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Look at every server: reachable, version, settings by which usage is lost, clock offset",
		Long: `Doctor exits 0 when all is well, 3 when a server is unreachable, 4 when one answers but has a setting by which usage would be
lost or counted twice, lacks a part of its schema or has it otherwise than weir migrate made it (what that does about it is said, or the
statement to run), or has a clock that is more than 2 s off.`,
		Example: "  weir doctor\n  weir doctor --nats nats://10.0.0.5:4222 -o json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			log, err := logger(cmd, "error")
			if err != nil {
				return err
			}
			if err := s.resolve(); err != nil {
				return err
			}
			all := app.Examine(cmd.Context(), app.Servers{NATS: s.nats, Redis: s.redis, ClickHouse: s.clickhouse}, s.embedded, timeout, log)
			if err := out.write(cmd.OutOrStdout(), all, func(w io.Writer) { printDiagnoses(w, all) }); err != nil {
				return err
			}
			return verdict(all)
		},
	}
	s.bind(cmd)
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Second, "for each server")
	out.bind(cmd)
	return cmd
}

func printDiagnoses(w io.Writer, all []app.Diagnosis) {
	fmt.Fprintln(w, "SERVER\tSTATUS\tVERSION\tCLOCK\tADDRESS")
	for _, d := range all {
		offset := "-"
		if d.OffsetMS != nil {
			offset = fmt.Sprintf("%+.1f ±%.1f ms", *d.OffsetMS, *d.ErrorMS)
		}
		text.Printf(w, "%s\t%s\t%s\t%s\t%s\n", d.Server, d.Status, dash(d.Version), offset, dash(d.Address))
	}
	for _, d := range all {
		for _, p := range d.Problems {
			text.Printf(w, "\nproblem\t%s: %s", d.Server, p)
		}
		for _, n := range d.Notes {
			text.Printf(w, "\nnote\t%s: %s", d.Server, n)
		}
	}
	fmt.Fprintln(w)
}

// verdict is the command's exit: the worst that was found.
func verdict(all []app.Diagnosis) error {
	var down, bad []string
	for _, d := range all {
		switch d.Status {
		case app.StatusUnreachable:
			down = append(down, d.Server)
		case app.StatusDegraded:
			bad = append(bad, d.Server)
		}
	}
	switch {
	case down != nil:
		return fmt.Errorf("%w: %s", errUnreachable, strings.Join(down, ", "))
	case bad != nil:
		return fmt.Errorf("%w: %s", errDegraded, strings.Join(bad, ", "))
	}
	return nil
}
