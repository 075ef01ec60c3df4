package main

import (
	"fmt"
	"io"
	"math"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/replay"
	"github.com/weirhq/weir/cmd/internal/text"
)

func replayCommand() *cobra.Command {
	var cfg replay.Config
	var s servers
	var speed, level string
	var out output
	cmd := &cobra.Command{
		Use:   "replay",
		Short: "Send a log through gateways of a live pipeline and prove that every request is stored once",
		Long: `Replay runs gateways of its own on the servers of a live pipeline (a running 'weir up' is found by its data folder), hands
them the log, waits until the aggregator has stored everything, and reads ClickHouse back. It exits 1 unless every request is there once.
What it sends is stored as usage of the log's tenants at the present time: use a pipeline that nobody is billed from.`,
		Example: "  weir replay --log access.log.gz --policy policy.yaml --speed max\n  weir replay --log access.log.gz --policy policy.yaml --nats nats://10.0.0.5:4222 --clickhouse http://10.0.0.6:8123/weir -o json",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			if err := required("--log", cfg.Log, "--policy", cfg.Policy); err != nil {
				return err
			}
			var err error
			if cfg.Speed, err = parseSpeed(speed); err != nil {
				return err
			}
			if cfg.Gateways < 1 || cfg.Gateways > 100 {
				return usagef("--gateways %d, want 1 to 100", cfg.Gateways)
			}
			log, err := logger(cmd, level)
			if err != nil {
				return err
			}
			if err := s.resolve(); err != nil {
				return err
			}
			bar := newProgress(cmd.ErrOrStderr())
			cfg.Progress = bar.show
			res, err := replay.Run(cmd.Context(), cfg, app.Servers{NATS: s.nats, Redis: s.redis, ClickHouse: s.clickhouse}, log)
			bar.end()
			sayUnread(cmd.ErrOrStderr(), cfg.Log, res.Log)
			if err != nil {
				return err
			}
			for _, w := range res.Warnings {
				text.Printf(cmd.ErrOrStderr(), "policy: %s\n", w)
			}
			if err := out.write(cmd.OutOrStdout(), res, func(w io.Writer) {
				text.Printf(w, "REQUESTS\tALLOWED\tREJECTED\tINVALID\tUNPARSED\tSTORED\tLOST\tDOUBLED\tSECONDS\n%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%.1f\n",
					res.Requests, res.Allowed, res.Rejected, res.Invalid, res.Unparsed, res.Stored, res.Lost, res.Doubled, res.ElapsedS)
				printCounts(w, "\nRULE\tREJECTED", res.ByRule)
			}); err != nil {
				return err
			}
			if !res.Whole() {
				return fmt.Errorf("stored %d of %d requests: %d lost, %d doubled", res.Stored, res.Requests, res.Lost, res.Doubled)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Log, "log", "", "access log")
	f.IntVar(&cfg.Gateways, "gateways", 3, "gateways to send it through")
	f.StringVar(&speed, "speed", "3600", "log seconds per second, or max")
	f.DurationVar(&cfg.Patience, "patience", 0, "how long nothing new may be stored before the rest counts as lost (default 1m0s)")
	bind(cmd, map[string]*string{"policy": &cfg.Policy})
	cmd.Flags().StringVar(&level, "log-level", "warn", "debug, info, warn or error")
	s.bind(cmd)
	out.bind(cmd)
	return cmd
}

func parseSpeed(s string) (float64, error) {
	if s == "max" {
		return math.Inf(1), nil
	}
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !(v > 0) || math.IsInf(v, 0) {
		return 0, usagef("--speed %q, want a number above 0 or max", s)
	}
	return v, nil
}
