package main

import (
	"encoding/json"
	"io"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/accuracy"
)

func benchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "bench",
		Short:   "Measure weir beside what others do",
		Example: "  weir bench accuracy --sim",
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(benchAccuracyCommand())
	return cmd
}

func benchAccuracyCommand() *cobra.Command {
	var cfg accuracy.Config
	var sim bool
	var charts, doc string
	var out output
	cmd := &cobra.Command{
		Use:   "accuracy",
		Short: "How near a fleet comes to one limit, beside a perfect shared bucket fed the same requests",
		Long: `Accuracy runs shifting traffic and failing parts against weir's modes and against what others do: dividing the limit by the number of
gateways, asking Redis about each request, and Gubernator's GLOBAL behaviour. The simulator runs the real limiter and the real aggregator
in virtual time over a modelled network, and gives the same result for the same seed.`,
		Example: "  weir bench accuracy --sim --seed 1\n  weir bench accuracy --sim --scenario step --scenario flash-crowd -o json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			if doc != "" && charts == "" {
				return usagef("--doc shows charts: say where with --svg")
			}
			bar := newProgress(cmd.ErrOrStderr())
			res, err := accuracy.Simulate(cmd.Context(), cfg, func(done, total int) { bar.show("simulated", done, total) })
			bar.end()
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
	f.BoolVar(&sim, "sim", true, "simulate, in virtual time")
	f.Uint64Var(&cfg.Seed, "seed", 1, "seed of all random choices")
	f.StringSliceVar(&cfg.Scenarios, "scenario", nil, "only this scenario, repeatable")
	f.StringSliceVar(&cfg.Modes, "mode", nil, "only this mode, repeatable")
	f.StringVar(&charts, "svg", "", "folder to write one chart per scenario to")
	f.StringVar(&doc, "doc", "", "Markdown file beside that folder, to write tables and charts into")
	out.bind(cmd)
	return cmd
}
