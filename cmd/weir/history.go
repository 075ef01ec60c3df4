package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/text"
	"github.com/weirhq/weir/internal/run"
)

func historyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "history",
		Short:   "Prove that the history adds up, rebuild its roll-ups, and correct it",
		Example: "  weir history verify --last 24h\n  weir history rebuild --from 2026-11-01T00:00:00Z --to 2026-12-01T00:00:00Z",
		Args:    known,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usagef("history what? One of: verify, rebuild, correct, corrections")
		},
	}
	cmd.AddCommand(historyVerifyCommand(), historyRebuildCommand(), historyCorrectCommand(), historyCorrectionsCommand())
	return cmd
}

// errDifferent is what a comparison found.
var errDifferent = errors.New("the accounts are different")

func historyRebuildCommand() *cobra.Command {
	var q question
	cmd := &cobra.Command{
		Use:   "rebuild",
		Short: "Make the roll-ups what the ledger adds up to, and prove it",
		Long: `Rebuild compares usage_1m, usage_1h and usage_1d with usage FINAL over whole days of UTC, puts right what differs, and compares
again. Reports may come in meanwhile; an interrupted rebuild is repeated. What one roll-up alone has too much is taken out of it. What
another has too may be lost from the ledger, and stays, as all does where the ledger lacks what reports say of themselves, has nothing,
or was made again since. It is said, and who knows that the ledger is right drops that month of the roll-up in ClickHouse before. It
exits 1 when something still differs.`,
		Example: "  weir history rebuild --from 2026-11-01T00:00:00Z --to 2026-12-01T00:00:00Z",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return q.ask(cmd, func(s *clickhouse.Store, from, to time.Time) error {
				r, err := s.Rebuild(cmd.Context(), from, to, func(day time.Time, rows uint64) {
					text.Printf(cmd.ErrOrStderr(), "%s: %d rows put right\n", day.Format(time.DateOnly), rows)
				})
				if err != nil {
					return err
				}
				if err := q.out.write(cmd.OutOrStdout(), r, func(w io.Writer) { printRebuilt(w, r) }); err != nil {
					return err
				}
				if !r.Equal || r.Half > 0 {
					return errDifferent
				}
				return nil
			})
		},
	}
	q.bind(cmd, 24*time.Hour)
	return cmd
}

func printRebuilt(w io.Writer, r clickhouse.Rebuilt) {
	for _, g := range r.Gaps {
		text.Printf(w, "%s\t%s\t%s\t%s\t%s\tallowed %+d, rejected %+d, cost %+d\n", g.Rollup, g.Time.Format(time.RFC3339), g.Tenant, g.Route, dash(g.Rule), g.Allowed, g.Rejected, g.Cost)
	}
	if r.Half > 0 {
		text.Printf(w, "%d reports are stored in part: their batch will come again; repeat this when the aggregator has caught up\n", r.Half)
	}
	for _, s := range r.Short {
		text.Printf(w, "%d reports that arrived on %s lack %d requests in the ledger: what roll-ups may have of them was left alone; weir history verify says whose they are\n", s.Reports, s.Day.Format(time.DateOnly), s.Requests)
	}
	if r.Bare > 0 {
		text.Printf(w, "the ledger has nothing of %d hours and days of roll-ups, or only what came long after: nothing was taken out of them\n", r.Bare)
	}
	if !r.Remade.IsZero() {
		text.Printf(w, "a part of the ledger or of a roll-up was made again at %s: nothing of an hour or day that began before was taken out\n", r.Remade.Format(time.RFC3339))
	}
	if r.Vouched > 0 {
		text.Printf(w, "%d sums of a roll-up were left alone, since another roll-up has them too: the ledger may have lost them\n", r.Vouched)
	}
	verdict := "equal"
	if !r.Equal || r.Half > 0 {
		verdict = "different"
	}
	text.Printf(w, "%s: %s to %s, %d rows put right\n", verdict, r.From.Format(time.RFC3339), r.To.Format(time.RFC3339), r.Rows)
}

func historyVerifyCommand() *cobra.Command {
	var q question
	var folders []string
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Compare the accounts of gateways, stream, Redis and ClickHouse, hour by hour",
		Long: `Verify compares, for whole hours: the numbers of the reports, which have no holes and go as far as the heartbeats of their gateways
told (they are kept for 30 days); what each report says of itself with its rows in usage, none of which is without its report; what
was taken of each bucket with the growth of its cumulative count, in ClickHouse and in Redis, as far as Redis still has it; and the
roll-ups with the ledger. What is not stored is looked for in the stream, among the dead letters and in the journals of those folders
that --journal names. The aggregator does the same once an hour, without journals.

It says "equal", or each difference with its cause: in flight; late (a gateway has it: its journal says so, or it told of it and is
alive, or its next life is delivering); refused (a dead letter, whatever its reason, that is not stored); lost; doubled; or between
which of these it cannot tell. A letter that cannot be taken for a report is in the hour in which it arrived; one that does not say
which report it is may be one that is called lost, and so may one in a spool that was not read. A file in a --journal that cannot be
read whole is lost, whichever hours are looked at, until somebody has taken it away; its hour is that in which it was last written.
Where there was nothing to compare with, in Redis or for want of --journal, it says so. No difference, and said apart: what the
buckets of a process that ended before it had sealed all that it counted gave after their last report, which Redis never hears of.
The table has 50 at most of the differences of one hour, cause and boot, and says how many more there are; -o json has all. It exits
0 when all is equal, 1 when something differs, 3 when a server is unreachable. Without --to, the hour that is not over is left out,
unless the time has no other: --last 1s takes it, as far as it has come.`,
		Example: "  weir history verify --last 24h\n  weir history verify --from 2026-11-29T10:00:00Z --to 2026-11-29T11:00:00Z --journal /var/lib/weir -o json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var journals []app.Journal
			for _, dir := range folders {
				found, err := app.Journals(dir)
				if err != nil {
					return usagef("--journal %s: %w", dir, err)
				}
				journals = append(journals, found...)
			}
			return q.ask(cmd, func(s *clickhouse.Store, from, to time.Time) (err error) {
				from = from.Truncate(time.Hour)
				if over := time.Now().UTC().Truncate(time.Hour); q.period.to == "" && from.Before(over) {
					to = over
				}
				log, err := logger(cmd, "error")
				if err != nil {
					return err
				}
				var stack run.Stack
				defer func() { err = errors.Join(err, stack.Stop(time.Second)) }()
				nc, err := app.Connect(cmd.Context(), q.servers.nats, "history", true, app.NewMetrics(), &stack, log)
				if err != nil {
					return err
				}
				counter, err := redis.New(redis.Config{URL: q.servers.redis, Timeout: 5 * time.Second})
				if err != nil {
					return err
				}
				stack.Defer("Redis client", counter.Close)
				r, err := app.Reconcile(cmd.Context(), app.Books{NATS: nc, Counter: counter, Store: s, Journals: journals}, from, to)
				if err != nil {
					return err
				}
				if err := q.out.write(cmd.OutOrStdout(), r, func(w io.Writer) { printReconciliation(w, r) }); err != nil {
					return err
				}
				if !r.Equal {
					return errDifferent
				}
				return nil
			})
		},
	}
	cmd.Flags().StringArrayVar(&folders, "journal", nil, "the --data folder of a gateway, as far as it is reachable from here; may be repeated")
	q.bind(cmd, 24*time.Hour)
	return cmd
}

// maxAlike is how many differences of one hour, cause and boot a table has: every second report may be missing.
const maxAlike = 50

func printReconciliation(w io.Writer, r app.Reconciliation) {
	if len(r.Differences) > 0 {
		fmt.Fprintln(w, "HOUR\tBETWEEN\tCAUSE\tGATEWAY\tBOOT\tRULE\tKEY\tWANT\tHAVE\tDETAIL")
	}
	alike := func(d app.Difference) app.Difference {
		return app.Difference{Hour: d.Hour, Between: d.Between, Cause: d.Cause, Gateway: d.Gateway, Boot: d.Boot}
	}
	all, seen := map[app.Difference]int{}, map[app.Difference]int{}
	for _, d := range r.Differences {
		all[alike(d)]++
	}
	for _, d := range r.Differences {
		of := alike(d)
		if seen[of]++; seen[of] > maxAlike {
			if seen[of] == all[of] {
				text.Printf(w, "%s\t%s\t%s\t%s\t%s\t-\t-\t-\t-\t… and %d more of these: -o json has them\n", d.Hour.Format(time.RFC3339), d.Between, d.Cause, dash(d.Gateway), dash(d.Boot), all[of]-maxAlike)
			}
			continue
		}
		text.Printf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\n", d.Hour.Format(time.RFC3339), d.Between, d.Cause, dash(d.Gateway), dash(d.Boot), dash(d.Rule), dash(d.Key), d.Want, d.Have, d.Detail)
	}
	for _, k := range r.Killed {
		text.Printf(w, "%s: %s, boot %s, ended before it had sealed all that it counted: Redis never heard of up to %d tokens, given to %d tenants after its last report; the ledger has the requests\n",
			k.Hour.Format(time.RFC3339), k.Gateway, k.Boot, k.Tokens, k.Tenants)
	}
	verdict := "equal"
	if len(r.Unseen) > 0 {
		verdict = "equal, with nothing to compare in " + strings.Join(r.Unseen, " and ")
	}
	if !r.Equal {
		verdict = fmt.Sprintf("%d differences", len(r.Differences))
	}
	corrected := ""
	if r.Corrected != 0 {
		corrected = fmt.Sprintf(" (corrections, apart: %+d)", r.Corrected)
	}
	text.Printf(w, "%s: %s to %s, %d requests%s, %d counts in Redis compared, %d journals\n", verdict, r.From.Format(time.RFC3339), r.To.Format(time.RFC3339), r.Requests, corrected, r.Counts, r.Journals)
}

func historyCorrectCommand() *cobra.Command {
	var s servers
	var out output
	var c clickhouse.Correction
	var hour string
	var anew bool
	cmd := &cobra.Command{
		Use:   "correct",
		Short: "Add a signed correction to one hour of one tenant, with its author and reason",
		Long: `Correct adds a row to the table corrections. Usage itself is never changed: the view corrected_1h is the sum of both, and so is every
answer of weir usage that has the whole hour, up to now if it is the present one; others say how many corrections they leave out.
Without --cost the tokens go with the requests, one for each; --cost 0 leaves them as they are. The same --ref again is the same
correction. No count can go below zero. A tenant, route or rule of which nothing is on record is taken for a typing error without --new. What a
report names with an empty tenant is corrected with --tenant ''.`,
		Example: `  weir history correct --gateway gw-1 --tenant acme --route export --hour 2026-11-29T10:00:00Z --allowed -41 --reason "load test" --by kim --ref TICKET-7`,
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if err := out.validate(); err != nil {
				return err
			}
			said := func(flag string) string { // also when it is empty
				if !cmd.Flags().Changed(flag) {
					return ""
				}
				return flag
			}
			if err := required("--gateway", c.Gateway, "--tenant", said("tenant"), "--route", said("route"), "--hour", hour, "--reason", c.Reason, "--by", c.Author); err != nil {
				return err
			}
			if c.Hour, err = time.Parse(time.RFC3339, hour); err != nil {
				return usagef("--hour %q, want a time such as 2026-11-29T10:00:00Z", hour)
			}
			log, err := logger(cmd, "warn")
			if err != nil {
				return err
			}
			if err := s.resolve(); err != nil {
				return err
			}
			if !cmd.Flags().Changed("cost") {
				c.Cost = c.Allowed + c.Rejected
			}
			if err := c.Validate(); err != nil {
				return usageError{err}
			}
			store, err := clickhouse.Open(s.clickhouse, log)
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, store.Close()) }()
			unheard, err := store.Unheard(cmd.Context(), c)
			if err != nil {
				return err
			}
			for _, flag := range unheard {
				switch name := cmd.Flag(flag).Value.String(); {
				case name == "" || strings.TrimSpace(name) != name:
					return fmt.Errorf("%s is %q, of which nothing is on record, and a new one is not empty and has no space around it", flag, name)
				case !anew:
					return fmt.Errorf("%s is %q, of which nothing is on record: say --new if it is meant", flag, name)
				}
			}
			made, err := store.Correct(cmd.Context(), c)
			if err != nil {
				return err
			}
			return out.write(cmd.OutOrStdout(), made, func(w io.Writer) { printCorrections(w, []clickhouse.Correction{made}) })
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.Gateway, "gateway", "", "the gateway that counted")
	f.StringVar(&c.Tenant, "tenant", "", "the tenant")
	f.StringVar(&c.Route, "route", "", "the route")
	f.StringVar(&c.Rule, "rule", "", "the rule that refused, for --rejected")
	f.StringVar(&hour, "hour", "", "the hour, RFC 3339")
	f.Int64Var(&c.Allowed, "allowed", 0, "requests allowed, more or (with -) fewer")
	f.Int64Var(&c.Rejected, "rejected", 0, "requests rejected, likewise")
	f.Int64Var(&c.Cost, "cost", 0, "tokens asked for, likewise (default one for each request)")
	f.StringVar(&c.Reason, "reason", "", "why")
	f.StringVar(&c.Author, "by", "", "who says so")
	f.BoolVar(&anew, "new", false, "a tenant, route or rule of which nothing is on record yet is meant")
	f.StringVar(&c.Ref, "ref", "", "names the correction: a ticket, for example (default made up)")
	s.bind(cmd)
	out.bind(cmd)
	return cmd
}

func historyCorrectionsCommand() *cobra.Command {
	var q question
	cmd := &cobra.Command{
		Use:     "corrections",
		Short:   "List the corrections of a time",
		Example: "  weir history corrections --last 720h",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return q.ask(cmd, func(s *clickhouse.Store, from, to time.Time) error {
				all, err := s.Corrections(cmd.Context(), from, to, "")
				if err != nil {
					return err
				}
				return q.out.write(cmd.OutOrStdout(), all, func(w io.Writer) { printCorrections(w, all) })
			})
		},
	}
	q.bind(cmd, 31*24*time.Hour)
	return cmd
}

func printCorrections(w io.Writer, all []clickhouse.Correction) {
	fmt.Fprintln(w, "HOUR\tREF\tGATEWAY\tTENANT\tROUTE\tRULE\tALLOWED\tREJECTED\tCOST\tBY\tREASON")
	for _, c := range all {
		text.Printf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%+d\t%+d\t%+d\t%s\t%s\n", c.Hour.Format(time.RFC3339), c.Ref, c.Gateway, c.Tenant, c.Route, dash(c.Rule), c.Allowed, c.Rejected, c.Cost, c.Author, c.Reason)
	}
}
