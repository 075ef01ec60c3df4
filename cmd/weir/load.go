package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/load"
	"github.com/weirhq/weir/cmd/internal/text"
	"github.com/weirhq/weir/internal/conf"
)

// bindLoad adds the flags of generated traffic, under a prefix.
func bindLoad(cmd *cobra.Command, cfg *load.Config, prefix string) {
	f := cmd.Flags()
	f.Float64Var(&cfg.Rate, prefix+"rate", 300, "requests per second of the ordinary tenants, averaged over a day")
	f.IntVar(&cfg.Tenants, prefix+"tenants", 200, "ordinary tenants")
	f.StringVar(&cfg.Mad, prefix+"mad", "acme", "tenant that goes mad from time to time; - is none")
	f.Float64Var(&cfg.MadRate, prefix+"mad-rate", 200, "requests per second of the mad tenant")
	f.DurationVar(&cfg.Day, prefix+"day", 2*time.Minute, "length of a simulated day with its peak")
	f.Uint64Var(&cfg.Seed, prefix+"seed", 1, "seed of the random choices")
}

func loadCommand() *cobra.Command {
	var cfg load.Config
	var data string
	var duration, every time.Duration
	var out output
	cmd := &cobra.Command{
		Use:   "load",
		Short: "Send generated traffic to gateways: Zipf tenants, a daily peak, one tenant that goes mad",
		Example: `  weir load --duration 1m
  weir load --url http://127.0.0.1:8080 --rate 1000 -o json`,
		Long: `Load sends traffic until --duration is over or it is interrupted. It exits 3 when no request ever got an answer.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			if duration < 0 || every <= 0 {
				return usagef("--duration %s and --every %s, want times above 0", duration, every)
			}
			if len(cfg.URLs) == 0 {
				urls, err := runningGateways(data)
				if err != nil {
					return err
				}
				cfg.URLs = urls
			}
			g, err := load.New(cfg)
			if err != nil {
				return usageError{err}
			}
			ctx := cmd.Context()
			if duration > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, duration)
				defer cancel()
			}
			if err := runLoad(ctx, g, every, func(s load.Summary) { printSummary(cmd.OutOrStdout(), out, s, nil) }); err != nil {
				return err
			}
			switch {
			case g.Unanswered():
				shown := make([]string, len(cfg.URLs))
				for i, u := range cfg.URLs {
					shown[i] = conf.Redact(u)
				}
				return fmt.Errorf("%w: no request was answered by %s", errUnreachable, strings.Join(shown, ", "))
			case duration > 0 && cmd.Context().Err() != nil:
				return cmd.Context().Err()
			}
			return nil
		},
	}
	bind(cmd, map[string]*string{"data": &data})
	cmd.Flags().StringArrayVar(&cfg.URLs, "url", nil, "gateway to send to, repeatable (default: those of a running weir up)")
	cmd.Flags().DurationVar(&duration, "duration", 0, "how long; 0 is until interrupted")
	cmd.Flags().DurationVar(&every, "every", 2*time.Second, "how often to print a summary")
	bindLoad(cmd, &cfg, "")
	out.bind(cmd)
	return cmd
}

// runningGateways reads the gateways of a running weir up.
func runningGateways(data string) ([]string, error) {
	file := filepath.Join(data, app.EndpointsFile)
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, usagef("no --url, and no running weir up: %v", err)
	}
	var e app.Endpoints
	if err := json.Unmarshal(b, &e); err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	return e.Gateways, nil
}

// runLoad runs g until ctx is done and reports what happened every so often.
func runLoad(ctx context.Context, g *load.Generator, every time.Duration, report func(load.Summary)) error {
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		t := time.NewTicker(every)
		defer t.Stop()
		last := time.Now()
		for {
			select {
			case <-done:
				if s := g.Take(); s.Requests > 0 { // the rest
					s.Elapsed = time.Since(last)
					report(s)
				}
				return
			case now := <-t.C:
				s := g.Take()
				s.Elapsed = now.Sub(last)
				last = now
				report(s)
			}
		}
	})
	err := g.Run(ctx)
	close(done)
	wg.Wait()
	return err
}

// printSummary writes one line a summary, with the alerts that fire.
func printSummary(w io.Writer, out output, s load.Summary, alerts []string) {
	if out == "json" {
		_ = json.NewEncoder(w).Encode(map[string]any{"seconds": s.Elapsed.Seconds(), "requests": s.Requests, "allowed": s.Allowed, "refused": s.Refused,
			"failed": s.Failed, "unsent": s.Unsent, "tenants": len(s.Tenants), "slowest_ms": s.Slowest.Milliseconds(), "alerts": alerts})
		return
	}
	sec := max(s.Elapsed.Seconds(), 0.001)
	line := fmt.Sprintf("%s %6.0f req/s  allowed %6.0f/s  refused %s  top", time.Now().Format("15:04:05"), float64(s.Requests)/sec, float64(s.Allowed)/sec, perRule(s.Refused, sec))
	for _, t := range s.Top(3) {
		line += fmt.Sprintf(" %s %.0f/s", text.Printable(t), float64(s.Tenants[t])/sec)
	}
	if len(s.Failed) > 0 {
		line += "  failed " + perRule(s.Failed, sec)
	}
	if s.Unsent > 0 {
		line += fmt.Sprintf("  unsent %d", s.Unsent)
	}
	if len(alerts) > 0 {
		line += "  ALERT " + text.Printable(strings.Join(alerts, ", "))
	}
	fmt.Fprintln(w, line)
}

// perRule prints counts by name, each per second.
func perRule(counts map[string]int, seconds float64) string {
	if len(counts) == 0 {
		return "0/s"
	}
	names := make([]string, 0, len(counts))
	for n := range counts {
		names = append(names, n)
	}
	slices.Sort(names)
	parts := make([]string, len(names))
	for i, n := range names {
		parts[i] = fmt.Sprintf("%s %.0f/s", text.Printable(n), float64(counts[n])/seconds)
	}
	return strings.Join(parts, ", ")
}
