package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/cmd/internal/text"
)

func usageCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "usage",
		Short:   "Ask ClickHouse who used what",
		Example: "  weir usage top --last 1h\n  weir usage tenant acme --last 24h --step 1h\n  weir usage curve --rule contract --tenant acme --last 10m",
		Args:    known,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usagef("usage of what? One of: top, tenant, curve")
		},
	}
	cmd.AddCommand(usageTopCommand(), usageTenantCommand(), usageCurveCommand())
	return cmd
}

// period is which time a question is about.
type period struct {
	last     time.Duration
	from, to string
}

func (p *period) bind(cmd *cobra.Command, last time.Duration) {
	cmd.Flags().DurationVar(&p.last, "last", last, "the time up to now; whole minutes when it is")
	cmd.Flags().StringVar(&p.from, "from", "", "beginning, RFC 3339, instead of --last")
	cmd.Flags().StringVar(&p.to, "to", "", "end, RFC 3339 (default now)")
}

func (p *period) times() (from, to time.Time, err error) {
	to = time.Now().UTC().Add(time.Second).Truncate(time.Second)
	if p.to != "" {
		if to, err = time.Parse(time.RFC3339, p.to); err != nil {
			return from, to, usagef("--to %q, want a time such as 2026-11-29T10:00:00Z", p.to)
		}
	}
	if p.from == "" {
		if p.last <= 0 {
			return from, to, usagef("--last %s, want more than 0", p.last)
		}
		if p.to == "" && p.last%time.Minute == 0 { // whole minutes, which the roll-ups answer for, and not over yet when the history is asked
			to = to.Add(time.Minute + 4*time.Second).Truncate(time.Minute)
		}
		return to.Add(-p.last), to, nil
	}
	if from, err = time.Parse(time.RFC3339, p.from); err != nil {
		return from, to, usagef("--from %q, want a time such as 2026-11-29T10:00:00Z", p.from)
	}
	if !from.Before(to) {
		return from, to, usagef("--from %s is not before --to %s", p.from, to.Format(time.RFC3339))
	}
	return from, to, nil
}

// question is what the usage commands have in common.
type question struct {
	servers servers
	period  period
	out     output
}

func (q *question) bind(cmd *cobra.Command, last time.Duration) {
	q.servers.bind(cmd)
	q.period.bind(cmd, last)
	q.out.bind(cmd)
}

// ask opens the history and calls f with the period.
func (q *question) ask(cmd *cobra.Command, f func(s *clickhouse.Store, from, to time.Time) error) (err error) {
	if err := q.out.validate(); err != nil {
		return err
	}
	from, to, err := q.period.times()
	if err != nil {
		return err
	}
	log, err := logger(cmd, "warn")
	if err != nil {
		return err
	}
	if err := q.servers.resolve(); err != nil {
		return err
	}
	store, err := clickhouse.Open(q.servers.clickhouse, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	return f(store, from, to)
}

func usageTopCommand() *cobra.Command {
	var q question
	var n int
	var by string
	cmd := &cobra.Command{
		Use:     "top",
		Short:   "The tenants with the most requests",
		Long:    "Top adds up what each tenant used. " + onCorrections,
		Example: "  weir usage top --last 1h --by rejected -n 5",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains([]string{clickhouse.ByRequests, clickhouse.ByAllowed, clickhouse.ByRejected, clickhouse.ByCost}, by) {
				return usagef("--by %q, want requests, allowed, rejected or cost", by)
			}
			if n < 1 || n > 10_000 {
				return usagef("-n %d, want 1 to 10000", n)
			}
			return q.ask(cmd, func(s *clickhouse.Store, from, to time.Time) error {
				top, err := s.Top(cmd.Context(), from, to, n, by)
				if err != nil {
					return err
				}
				if err := sayCut(cmd, s, "", from, to); err != nil {
					return err
				}
				return q.out.write(cmd.OutOrStdout(), top, func(w io.Writer) {
					fmt.Fprintln(w, "TENANT\tREQUESTS\tALLOWED\tREJECTED\tCOST")
					for _, t := range top {
						text.Printf(w, "%s\t%d\t%d\t%d\t%d\n", t.Tenant, t.Requests, t.Allowed, t.Rejected, t.Cost)
					}
				})
			})
		},
	}
	cmd.Flags().IntVarP(&n, "number", "n", 10, "tenants listed, 1 to 10000")
	cmd.Flags().StringVar(&by, "by", clickhouse.ByRequests, "requests, allowed, rejected or cost")
	q.bind(cmd, time.Hour)
	return cmd
}

func usageTenantCommand() *cobra.Command {
	var q question
	var step time.Duration
	cmd := &cobra.Command{
		Use:     "tenant NAME",
		Short:   "What one tenant used, per route and over time, and which rule refused it",
		Long:    "Tenant adds up what one tenant used. " + onCorrections + "\nThe series has them where its steps are hours of the clock.",
		Example: "  weir usage tenant acme --last 24h --step 1h",
		Args:    oneArg("the tenant's name"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkStep(step); err != nil {
				return err
			}
			return q.ask(cmd, func(s *clickhouse.Store, from, to time.Time) error {
				if q.period.from == "" && step%time.Hour == 0 { // so that steps are hours of the clock, as corrections are
					from = from.Truncate(time.Hour)
				}
				u, err := s.Tenant(cmd.Context(), args[0], from, to, step)
				if err != nil {
					return err
				}
				if err := sayCut(cmd, s, args[0], from, to); err != nil {
					return err
				}
				if u.Apart {
					text.Printf(cmd.ErrOrStderr(), "corrections are in the totals and not in the series, whose steps are not hours of the clock: --step 1h from a whole hour has them\n")
				}
				return q.out.write(cmd.OutOrStdout(), u, func(w io.Writer) {
					fmt.Fprintln(w, "ROUTE\tRULE\tALLOWED\tREJECTED\tCOST")
					for _, r := range u.Routes {
						text.Printf(w, "%s\t%s\t%d\t%d\t%d\n", r.Route, dash(r.Rule), r.Allowed, r.Rejected, r.Cost)
					}
					fmt.Fprintln(w, "\nTIME\tROUTE\tRULE\tALLOWED\tREJECTED")
					for _, p := range u.Points {
						text.Printf(w, "%s\t%s\t%s\t%d\t%d\n", p.Time.UTC().Format(time.RFC3339), p.Route, dash(p.Rule), p.Allowed, p.Rejected)
					}
				})
			})
		},
	}
	cmd.Flags().DurationVar(&step, "step", time.Minute, "length of a step of the series; with whole hours --last begins with one of the clock")
	q.bind(cmd, time.Hour)
	return cmd
}

func usageCurveCommand() *cobra.Command {
	var q question
	var step time.Duration
	var rule, key, tenant string
	cmd := &cobra.Command{
		Use:     "curve",
		Short:   "How full the buckets of a rule were over time",
		Example: "  weir usage curve --rule contract --tenant acme --last 10m --step 10s",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := required("--rule", rule); err != nil {
				return err
			}
			if key != "" && tenant != "" {
				return usagef("--key and --tenant exclude one another")
			}
			if err := checkStep(step); err != nil {
				return err
			}
			return q.ask(cmd, func(s *clickhouse.Store, from, to time.Time) error {
				points, err := s.Curve(cmd.Context(), clickhouse.CurveQuery{Rule: rule, Key: key, Tenant: tenant, From: from, To: to, Step: step})
				if err != nil {
					return err
				}
				return q.out.write(cmd.OutOrStdout(), points, func(w io.Writer) {
					fmt.Fprintln(w, "TIME\tTOKENS\tCAPACITY\tMIN\tTAKEN\tREFUSED")
					for _, p := range points {
						text.Printf(w, "%s\t%d\t%d\t%d\t%d\t%d\n", p.Time.UTC().Format(time.RFC3339), p.Last, p.Capacity, p.Min, p.Taken, p.Refused)
					}
				})
			})
		},
	}
	cmd.Flags().StringVar(&rule, "rule", "", "the rule's name")
	cmd.Flags().StringVar(&key, "key", "", "the bucket's key, as in the table tokens")
	cmd.Flags().StringVar(&tenant, "tenant", "", "all buckets of a tenant")
	cmd.Flags().DurationVar(&step, "step", 10*time.Second, "length of a step")
	q.bind(cmd, 10*time.Minute)
	return cmd
}

// onCorrections is what help says of them.
const onCorrections = `A correction (see weir history correct) is of an hour, and counts in an answer that has all of it,
up to now if it is the present one. How many are left out is said on standard error.`

// sayCut tells of the corrections that an answer leaves out.
func sayCut(cmd *cobra.Command, s *clickhouse.Store, tenant string, from, to time.Time) error {
	n, err := s.CutCorrections(cmd.Context(), tenant, from, to)
	if n > 0 {
		text.Printf(cmd.ErrOrStderr(), "%d corrections are left out, for only a part of their hour is asked for: --from and --to of whole hours have them\n", n)
	}
	return err
}

// checkStep refuses a step that no answer could have.
func checkStep(step time.Duration) error {
	if step < time.Millisecond || step%time.Millisecond != 0 {
		return usagef("--step %s, want whole milliseconds, at least one", step)
	}
	return nil
}

// oneArg wants exactly one argument.
func oneArg(what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != 1 {
			return usagef("%s wants %s and nothing else, got %d arguments", cmd.CommandPath(), what, len(args))
		}
		return nil
	}
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// printCounts prints a count for each name, in order of names.
func printCounts(w io.Writer, head string, counts map[string]int) {
	names := make([]string, 0, len(counts))
	for n := range counts {
		names = append(names, n)
	}
	slices.Sort(names)
	fmt.Fprintln(w, head)
	for _, n := range names {
		text.Printf(w, "%s\t%d\n", n, counts[n])
	}
}
