package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/simulate"
)

func simulateCommand() *cobra.Command {
	var cfg simulate.Config
	var out output
	cmd := &cobra.Command{
		Use:   "simulate",
		Short: "Say who would have been throttled: the real limiter over a log's own clock, no server needed",
		Long: `Simulate takes the requests of an access log in time order and decides about each as a gateway under the policy would have.
One request costs one token in every rule that applies; a refused one takes nothing. The result is exact, and the same on every run.
Logs are Common or Combined Log Format or JSON lines, plain or gzipped.`,
		Example: "  weir simulate --log access.log.gz --policy policy.yaml\n  zcat access.log.gz | weir simulate --log - --policy policy.yaml -o json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			if err := required("--log", cfg.Log, "--policy", cfg.Policy); err != nil {
				return err
			}
			bar := newProgress(cmd.ErrOrStderr())
			cfg.Progress = func(done, total int) { bar.show("simulated", done, total) }
			res, err := simulate.Run(cmd.Context(), cfg)
			bar.end()
			if err != nil {
				return err
			}
			for _, w := range res.Warnings {
				fmt.Fprintf(cmd.ErrOrStderr(), "policy: %s\n", w)
			}
			for _, p := range res.Log.Problems {
				fmt.Fprintf(cmd.ErrOrStderr(), "%s:%d: not a request: %s\n", cfg.Log, p.Line, p.Reason)
			}
			return writeResult(cmd.OutOrStdout(), out, res.WriteJSON, res.WriteTable)
		},
	}
	cmd.Flags().StringVar(&cfg.Log, "log", "", "access log; - is standard input")
	cmd.Flags().IntVar(&cfg.Top, "top", 10, "tenants listed")
	bind(cmd, map[string]*string{"policy": &cfg.Policy})
	out.bind(cmd)
	return cmd
}

// writeResult writes a result that knows both of its forms.
func writeResult(w io.Writer, out output, asJSON, asTable func(io.Writer) error) error {
	if out == "json" {
		return asJSON(w)
	}
	return asTable(w)
}

// required refuses settings without a value, all at once. pairs are names and values.
func required(pairs ...string) error {
	var missing []string
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] == "" {
			missing = append(missing, pairs[i])
		}
	}
	switch len(missing) {
	case 0:
		return nil
	case 1:
		return usagef("%s is required", missing[0])
	}
	return usagef("%v are required", missing)
}
