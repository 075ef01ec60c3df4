package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/accuracy"
)

func benchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "bench",
		Short:   "Measure weir beside what others do",
		Example: "  weir bench accuracy --sim",
		Args:    known,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(benchAccuracyCommand())
	return cmd
}

func benchAccuracyCommand() *cobra.Command {
	var cfg accuracy.Config
	var sim, live, whole bool
	var rivals, charts, doc, level string
	var out output
	cmd := &cobra.Command{
		Use:   "accuracy",
		Short: "How near a fleet comes to one limit, beside a perfect shared bucket fed the same requests",
		Long: `Accuracy runs shifting traffic and failing parts against weir's modes and against what others do: dividing the limit by the number of
gateways, asking Redis about each request, and Gubernator's GLOBAL behaviour. The simulator runs the real limiter and the real aggregator
in virtual time over a modelled network, and gives the same result for the same seed. The live variant runs NATS, Redis, an aggregator and
gateways, in real time.`,
		Example: "  weir bench accuracy --sim --seed 1\n  weir bench accuracy --sim --scenario step --scenario flash-crowd -o json\n  weir bench accuracy --live --rivals internal/bench",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			if doc != "" && charts == "" {
				return usagef("--doc shows charts: say where with --svg")
			}
			if doc != "" && (live || len(cfg.Scenarios)+len(cfg.Modes) > 0) {
				return usagef("--doc replaces all results by those of all scenarios and modes in the simulator: leave --live, --scenario and --mode out")
			}
			if sim && live {
				return usagef("--sim or --live, not both")
			}
			for name, chosen := range map[string][]string{"scenario": cfg.Scenarios, "mode": cfg.Modes} {
				if cmd.Flags().Changed(name) && (len(chosen) == 0 || slices.Contains(chosen, "")) {
					return usagef("--%s is empty: name one, or leave it out for all", name)
				}
			}
			for _, name := range []string{"whole", "rivals", "log-level"} {
				if !live && cmd.Flags().Changed(name) {
					return usagef("--%s is for --live: the simulator has no use of it", name)
				}
			}
			if cfg.Seed == 0 {
				return usagef("--seed is 0: the first is 1")
			}
			if cmd.Flags().Changed("rivals") {
				if _, err := os.Stat(filepath.Join(rivals, "rivals", "main.go")); err != nil {
					return usagef("--rivals: no Go module of rivals in %q: %w", rivals, err)
				}
			}
			log := slog.New(slog.DiscardHandler) // parts fail on purpose
			if level != "" {
				var err error
				if log, err = logger(cmd, level); err != nil {
					return err
				}
			}
			bar := newProgress(cmd.ErrOrStderr())
			show := func(done, total int) { bar.show("runs", done, total) }
			var res *accuracy.Result
			var err error
			if live {
				res, err = benchLive(cmd.Context(), accuracy.LiveConfig{Config: cfg, Rivals: rivals, Whole: whole}, log, show)
			} else {
				res, err = accuracy.Simulate(cmd.Context(), cfg, show)
			}
			bar.end()
			if errors.As(err, new(*accuracy.UnknownError)) {
				return usageError{err}
			}
			if err != nil {
				return err
			}
			if charts != "" {
				if err := res.WriteCharts(charts); err != nil {
					return err
				}
			}
			if doc != "" {
				if err := res.WriteDoc(doc, filepath.Base(charts)); err != nil {
					return err
				}
			}
			return writeResult(cmd.OutOrStdout(), out, func(w io.Writer) error {
				enc := json.NewEncoder(w)
				enc.SetIndent("", " ")
				return enc.Encode(res.Rows)
			}, res.WriteTable)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&sim, "sim", false, "simulate, in virtual time (the default)")
	f.BoolVar(&live, "live", false, "run over real servers in real time")
	f.BoolVar(&whole, "whole", false, "with --live: all of each scenario and not only its beginning, such as all 100 steps")
	f.StringVar(&rivals, "rivals", "", "with --live: folder of the Go module that runs redis_rate and Gubernator (internal/bench)")
	f.Uint64Var(&cfg.Seed, "seed", 1, "seed of all random choices")
	f.StringSliceVar(&cfg.Scenarios, "scenario", nil, "only this scenario, repeatable")
	f.StringSliceVar(&cfg.Modes, "mode", nil, "only this mode, repeatable")
	f.StringVar(&charts, "svg", "", "folder to write one chart per scenario to")
	f.StringVar(&doc, "doc", "", "Markdown file beside that folder, to write tables and charts into")
	f.StringVar(&level, "log-level", "", "with --live: debug, info, warn or error; nothing is logged without it")
	out.bind(cmd)
	return cmd
}

// benchLive runs over servers in a folder that is gone afterwards.
func benchLive(ctx context.Context, cfg accuracy.LiveConfig, log *slog.Logger, show func(done, total int)) (res *accuracy.Result, err error) {
	if cfg.Dir, err = os.MkdirTemp("", "weir-accuracy-"); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(cfg.Dir)) }()
	return accuracy.Live(ctx, cfg, log, show)
}
