package main

import (
	"context"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/internal/conf"
	"github.com/weirhq/weir/internal/obs"
	"github.com/weirhq/weir/internal/run"
)

// process is what every long-running command has: a log, metrics, and parts that stop in order.
type process struct {
	ctx     context.Context // of the command: done on a signal
	log     *slog.Logger
	metrics *app.Metrics
	stack   run.Stack
}

func newProcess(cmd *cobra.Command, level string) (*process, error) {
	log, err := logger(cmd, level)
	if err != nil {
		return nil, err
	}
	return &process{ctx: cmd.Context(), log: log, metrics: app.NewMetrics()}, nil
}

// serve adds the listener for metrics and waits for the end: a signal, or a part that fails.
func (p *process) serve(metricsAddr string, checks ...obs.Check) error {
	if _, err := p.admin(metricsAddr, checks...); err != nil {
		return p.fail(err)
	}
	return p.wait()
}

// admin serves health and metrics, and returns the real address.
func (p *process) admin(addr string, checks ...obs.Check) (string, error) {
	a, err := obs.NewAdmin(addr, p.metrics.Registry, p.log, checks...)
	if err != nil {
		return "", err
	}
	p.stack.Go("metrics", a.Run)
	p.log.Info("serving", "metrics", address(a.Addr())+"/metrics", "version", obs.Version())
	return a.Addr(), nil
}

func (p *process) wait() error {
	err := p.stack.Wait(p.ctx, app.StopTimeout)
	p.log.Info("stopped", "err", err)
	return err
}

// fail stops what has started already and returns err. What a signal interrupts before it is up has not failed.
func (p *process) fail(err error) error {
	if stopErr := p.stack.Stop(app.StopTimeout); stopErr != nil {
		p.log.Warn("stop", "err", stopErr)
	}
	if p.ctx.Err() != nil {
		p.log.Info("stopped before it was up", "err", err)
		return nil
	}
	return err
}

func gatewayCommand() *cobra.Command {
	var s servers
	var cfg app.GatewayConfig
	var policy, upstream, metricsAddr, level, spoolMax string
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Stand in front of an API: reverse proxy and check API over local token buckets",
		Long: `A gateway decides about each request by itself and reports what it decided over NATS. It starts, decides and counts whether
NATS is there or not. Its name is its subject: two gateways must not share one.`,
		Example: "  weir gateway --upstream http://127.0.0.1:3000 --policy policy.yaml --nats nats://10.0.0.5:4222",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := required("--upstream", upstream, "--policy", policy); err != nil {
				return err
			}
			u, err := parseUpstream(upstream)
			if err != nil {
				return err
			}
			cfg.Upstream, cfg.Data = u, s.data
			if cfg.SpoolMax, err = parseSize("--spool-max", spoolMax); err != nil {
				return err
			}
			if err := s.resolve(); err != nil {
				return err
			}
			p, err := newProcess(cmd, level)
			if err != nil {
				return err
			}
			pol, err := app.NewPolicy(policy, p.metrics, p.log)
			if err != nil {
				return err
			}
			p.stack.Go("policy", pol.Run)
			nc, err := app.Connect(cmd.Context(), s.nats, cfg.Name, false, p.metrics, &p.stack, p.log)
			if err != nil {
				return p.fail(err)
			}
			g, err := app.NewGateway(cfg, pol, nc, p.metrics, &p.stack, p.log)
			if err != nil {
				return p.fail(err)
			}
			p.log.Info("gateway is up", "gateway", g.Name, "addr", g.Addr, "check", g.CheckAddr, "upstream", u.Redacted())
			return p.serve(metricsAddr, obs.Check{Name: "policy", Ready: g.Ready})
		},
	}
	cmd.Flags().StringVar(&cfg.Name, "name", hostname(), "the gateway's name: letters, digits, '-' and '_'")
	cmd.Flags().IntVar(&cfg.Fleet, "fleet", 1, "gateways that share the limits, until the centre has said how many")
	bind(cmd, map[string]*string{"nats": &s.nats, "data": &s.data, "policy": &policy, "upstream": &upstream, "gateway-addr": &cfg.Addr,
		"check-addr": &cfg.CheckAddr, "metrics-addr": &metricsAddr, "log-level": &level, "spool-max": &spoolMax})
	return cmd
}

func parseUpstream(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return nil, usagef("--upstream %s, want an address such as http://127.0.0.1:3000", conf.Redact(s))
	}
	return u, nil
}

// hostname is this machine's name as a subject token.
func hostname() string {
	name, err := os.Hostname()
	if err != nil {
		return "gateway"
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '_':
			return r
		}
		return '-'
	}, name[:min(len(name), 64)])
}

func aggregatorCommand() *cobra.Command {
	var s servers
	var metricsAddr, level string
	cmd := &cobra.Command{
		Use:     "aggregator",
		Short:   "Reconcile counts in Redis, divide limits between gateways, keep the history in ClickHouse",
		Example: "  weir aggregator --nats nats://10.0.0.5:4222 --redis redis://10.0.0.7:6379 --clickhouse clickhouse://10.0.0.6:9000/weir",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.resolve(); err != nil {
				return err
			}
			p, err := newProcess(cmd, level)
			if err != nil {
				return err
			}
			nc, err := app.Connect(cmd.Context(), s.nats, "aggregator", true, p.metrics, &p.stack, p.log)
			if err != nil {
				return p.fail(err)
			}
			a, err := app.NewAggregator(cmd.Context(), app.Servers{NATS: s.nats, Redis: s.redis, ClickHouse: s.clickhouse}, nc, p.metrics, &p.stack, p.log)
			if err != nil {
				return p.fail(err)
			}
			return p.serve(metricsAddr, obs.Check{Name: "streams", Ready: a.Ready})
		},
	}
	s.bind(cmd)
	bind(cmd, map[string]*string{"metrics-addr": &metricsAddr, "log-level": &level})
	return cmd
}

func alerterCommand() *cobra.Command {
	var s servers
	var hook, metricsAddr, level string
	var hold time.Duration
	cmd := &cobra.Command{
		Use:   "alerter",
		Short: "Watch usage and heartbeats, and wake on-call by a signed webhook",
		Long: `The alerter reads usage reports and heartbeats from NATS. What it decides is a message in a stream before it is sent, so that a
crash loses nothing; a receiver that fails is tried again with the same webhook-id. With a webhook it starts without NATS too, and
tells on-call that NATS is away. Without a webhook, alerts are stored and logged.`,
		Example: "  WEIR_WEBHOOK_SECRET_FILE=secret weir alerter --webhook https://oncall.example/weir",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.resolve(); err != nil {
				return err
			}
			secret, err := conf.Env("WEIR_WEBHOOK_SECRET")
			if err != nil {
				return err
			}
			p, err := newProcess(cmd, level)
			if err != nil {
				return err
			}
			nc, err := app.Connect(cmd.Context(), s.nats, "alerter", hook == "", p.metrics, &p.stack, p.log)
			if err != nil {
				return p.fail(err)
			}
			a, err := app.NewAlerter(cmd.Context(), app.AlerterConfig{Webhook: conf.Secret(hook), Secret: secret, Detector: alerting.Config{Hold: hold}}, nc, p.metrics, &p.stack, p.log)
			if err != nil {
				return p.fail(err)
			}
			return p.serve(metricsAddr, obs.Check{Name: "streams", Ready: a.Ready})
		},
	}
	cmd.Flags().DurationVar(&hold, "hold", 10*time.Second, "a subject has to be well for so long before its alert is resolved; twice as long each time it comes back within an hour")
	bind(cmd, map[string]*string{"nats": &s.nats, "data": &s.data, "webhook": &hook, "metrics-addr": &metricsAddr, "log-level": &level})
	return cmd
}

// address is host:port as a URL.
func address(hostPort string) string { return "http://" + hostPort }
