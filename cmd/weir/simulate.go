package main

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/simulate"
	"github.com/weirhq/weir/cmd/internal/text"
	"github.com/weirhq/weir/internal/accesslog"
)

func simulateCommand() *cobra.Command {
	var cfg simulate.Config
	var out output
	cmd := &cobra.Command{
		Use:   "simulate",
		Short: "Say who would have been throttled: the real limiter over a log's own clock, no server needed",
		Long: `Simulate takes the requests of an access log in time order and decides about each as a gateway under the policy would have.
One request costs one token in every rule that applies; a refused one takes nothing. The result is exact, and the same on every run.
Logs are Common or Combined Log Format or JSON lines, plain or gzipped; what cannot be read is counted and shown.

A JSON line is one request. It has "ts" or "time" (RFC 3339, or seconds since 1970 with any fraction) and "path" or "uri" (with or
without a query), and may have "method", "ip" or "client", "tenant", "user", "device", "status" and "headers" (an object):
  {"ts":"2026-11-29T10:00:00.5Z","ip":"192.0.2.7","method":"GET","path":"/orders/7","tenant":"acme"}
"headers" stands for the request's headers, "user" for the user of basic authentication, else X-User, and "device" for X-Device-Id.
Where the log lacks what the policy reads the tenant from, "tenant" is the tenant, and without it the request is of tenant anonymous.`,
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
				text.Printf(cmd.ErrOrStderr(), "policy: %s\n", w)
			}
			sayUnread(cmd.ErrOrStderr(), cfg.Log, res.Log)
			return writeResult(cmd.OutOrStdout(), out, res.WriteJSON, res.WriteTable)
		},
	}
	cmd.Flags().StringVar(&cfg.Log, "log", "", "access log; - is standard input")
	cmd.Flags().IntVar(&cfg.Top, "top", 10, "tenants listed")
	bind(cmd, map[string]*string{"policy": &cfg.Policy})
	out.bind(cmd)
	return cmd
}

// sayUnread says what of a log could not be read.
func sayUnread(w io.Writer, log string, stats accesslog.Stats) {
	for _, p := range stats.Problems {
		text.Printf(w, "%s:%d: not a request: %s\n", log, p.Line, p.Reason)
	}
	if more := stats.Unparsed - len(stats.Problems); more > 0 {
		text.Printf(w, "%s: %d more lines are not requests\n", log, more)
	}
	if stats.CutOff {
		text.Printf(w, "%s: the log ends in the middle: what there is of it is read, %d requests\n", log, stats.Requests)
	}
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
