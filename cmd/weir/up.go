package main

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/spf13/cobra"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/load"
	"github.com/weirhq/weir/cmd/internal/text"
	"github.com/weirhq/weir/internal/conf"
	"github.com/weirhq/weir/internal/obs"
	"github.com/weirhq/weir/schemas"
)

// defaultPolicy is written into the data folder of the first `weir up`, for the operator to edit.
//
//go:embed policy.yaml
var defaultPolicy []byte

type upConfig struct {
	servers                                                          servers
	policy, upstream, webhook, gateway, check, metrics, lv, spoolMax string
	gateways                                                         int
	load                                                             bool
	traffic                                                          load.Config
}

func upCommand() *cobra.Command {
	var cfg upConfig
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run the whole pipeline: gateways, aggregator, alerter, and embedded servers where none are named",
		Long: `Up runs everything in one process. A server without an address is embedded: NATS with JetStream in the process, Redis as a child
(redis-server, else miniredis), the real ClickHouse engine as a child. State is kept in the data folder and used again by the next run;
the addresses are written to endpoints.json there, where the other commands find them.`,
		Example: "  weir up --load\n  weir up --upstream http://127.0.0.1:3000 --policy policy.yaml --webhook https://oncall.example/weir",
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cfg.run(cmd) },
	}
	f := cmd.Flags()
	f.IntVar(&cfg.gateways, "gateways", 3, "gateways; the first has --gateway-addr and --check-addr, the others free ports")
	f.BoolVar(&cfg.load, "load", false, "send generated traffic, and print what happens")
	cfg.servers.bind(cmd)
	bind(cmd, map[string]*string{"policy": &cfg.policy, "upstream": &cfg.upstream, "webhook": &cfg.webhook, "gateway-addr": &cfg.gateway,
		"check-addr": &cfg.check, "metrics-addr": &cfg.metrics, "log-level": &cfg.lv, "spool-max": &cfg.spoolMax})
	bindLoad(cmd, &cfg.traffic, "load-")
	return cmd
}

func (c *upConfig) run(cmd *cobra.Command) error {
	if c.gateways < 1 || c.gateways > 100 {
		return usagef("--gateways %d, want 1 to 100", c.gateways)
	}
	if err := c.servers.validate(); err != nil {
		return err
	}
	spoolMax, err := parseSize("--spool-max", c.spoolMax)
	if err != nil {
		return err
	}
	secret, err := conf.Env("WEIR_WEBHOOK_SECRET")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.servers.data, 0o755); err != nil {
		return fmt.Errorf("make the data folder: %w", err)
	}
	if c.policy == "" {
		if c.policy, err = ensurePolicy(c.servers.data); err != nil {
			return err
		}
	}
	p, err := newProcess(cmd, c.lv)
	if err != nil {
		return err
	}
	policy, err := app.NewPolicy(c.policy, p.metrics, p.log)
	if err != nil {
		return err
	}
	p.stack.Go("policy", policy.Run)
	end, err := c.start(cmd, p, policy, secret, spoolMax)
	if err != nil {
		return p.fail(err)
	}
	if err := end.Write(c.servers.data); err != nil {
		return p.fail(err)
	}
	p.stack.Defer("endpoints file", func() error { return os.Remove(filepath.Join(c.servers.data, app.EndpointsFile)) })
	text.Printf(cmd.OutOrStdout(), "weir is up: gateway %s, check %s/v1/check, metrics %s/metrics; policy %s; Ctrl-C ends it\n", end.Gateway, end.Check, end.Metrics, c.policy)
	if c.load {
		if err := c.generate(cmd, p, end); err != nil {
			return p.fail(err)
		}
	}
	return p.wait()
}

// ensurePolicy writes the default policy unless the data folder has one.
func ensurePolicy(data string) (string, error) {
	file := filepath.Join(data, "policy.yaml")
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		return file, err
	}
	if err := os.WriteFile(file, defaultPolicy, 0o644); err != nil {
		return "", fmt.Errorf("write the default policy: %w", err)
	}
	return file, nil
}

// start starts every part, the servers first.
func (c *upConfig) start(cmd *cobra.Command, p *process, policy *app.Policy, secret conf.Secret, spoolMax int64) (end app.Endpoints, err error) {
	ctx := cmd.Context()
	s, err := app.Embed(app.Servers{NATS: c.servers.nats, Redis: c.servers.redis, ClickHouse: c.servers.clickhouse}, c.servers.data, &p.stack, p.log)
	if err != nil {
		return end, err
	}
	end.NATS, end.Redis, end.ClickHouse = s.NATS, s.Redis, s.ClickHouse
	if err := migrate(ctx, s.ClickHouse, p); err != nil {
		return end, err
	}
	if c.upstream == "" {
		if c.upstream, err = app.Echo(&p.stack, p.log); err != nil {
			return end, err
		}
	}
	upstream, err := parseUpstream(c.upstream)
	if err != nil {
		return end, err
	}
	connect := func(name string) (*nats.Conn, error) {
		return app.Connect(ctx, s.NATS, name, true, p.metrics, &p.stack, p.log)
	}
	nc, err := connect("aggregator")
	if err != nil {
		return end, err
	}
	agg, err := app.NewAggregator(ctx, s, nc, p.metrics, &p.stack, p.log)
	if err != nil {
		return end, err
	}
	if nc, err = connect("alerter"); err != nil {
		return end, err
	}
	alerter, err := app.NewAlerter(ctx, app.AlerterConfig{Webhook: conf.Secret(c.webhook), Secret: secret}, nc, p.metrics, &p.stack, p.log)
	if err != nil {
		return end, err
	}
	// Gateways decide without the rest: what is behind them is shown and keeps no traffic away.
	checks := []obs.Check{{Name: "aggregator", Ready: agg.Ready, Beside: true}, {Name: "alerter", Ready: alerter.Ready, Beside: true}}
	for i := range c.gateways {
		cfg := app.GatewayConfig{Name: fmt.Sprintf("gateway-%d", i+1), Addr: "127.0.0.1:0", CheckAddr: "127.0.0.1:0", Upstream: upstream,
			Fleet: c.gateways, Data: c.servers.data, SpoolMax: spoolMax}
		if i == 0 {
			cfg.Addr, cfg.CheckAddr = c.gateway, c.check
		}
		if nc, err = connect(cfg.Name); err != nil {
			return end, err
		}
		g, err := app.NewGateway(cfg, policy, nc, p.metrics, &p.stack, p.log)
		if err != nil {
			return end, err
		}
		end.Gateways = append(end.Gateways, address(g.Addr))
		if i == 0 {
			end.Check = address(g.CheckAddr)
		}
		checks = append(checks, obs.Check{Name: g.Name, Ready: g.Ready})
	}
	end.Gateway = end.Gateways[0]
	addr, err := p.admin(c.metrics, checks...)
	if err != nil {
		return end, err
	}
	end.Metrics = address(addr)
	return end, nil
}

func migrate(ctx context.Context, url string, p *process) (err error) {
	store, err := clickhouse.Open(url, p.log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	return store.Migrate(ctx, func(line string) { p.log.Info("migrate", "step", line) })
}

// generate sends traffic on the stack and prints summaries with the alerts that fire.
func (c *upConfig) generate(cmd *cobra.Command, p *process, end app.Endpoints) error {
	c.traffic.URLs = end.Gateways
	g, err := load.New(c.traffic)
	if err != nil {
		return usageError{err}
	}
	nc, err := app.Connect(cmd.Context(), end.NATS, "load", true, p.metrics, &p.stack, p.log)
	if err != nil {
		return err
	}
	firing, err := watchAlerts(nc)
	if err != nil {
		return err
	}
	p.stack.Go("generated traffic", func(ctx context.Context) error {
		return runLoad(ctx, g, 2*time.Second, func(s load.Summary) { printSummary(cmd.OutOrStdout(), "table", s, firing()) })
	})
	return nil
}

// watchAlerts follows what fires. The returned func lists it.
func watchAlerts(nc *nats.Conn) (func() []string, error) {
	var mu sync.Mutex
	firing := map[string]string{}
	_, err := nc.Subscribe(schemas.AlertPrefix+"*", func(m *nats.Msg) {
		a, err := schemas.DecodeAlert(m.Data)
		if err != nil {
			return // the alerter's own readers say so
		}
		mu.Lock()
		defer mu.Unlock()
		if a.Type == schemas.AlertResolved {
			delete(firing, a.DedupKey)
			return
		}
		firing[a.DedupKey] = fmt.Sprintf("%s(%s)", a.Name, cmp.Or(a.Tenant, a.Rule, a.Gateway, a.Part))
	})
	if err != nil {
		return nil, fmt.Errorf("follow alerts: %w", err)
	}
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Sorted(maps.Values(firing))
	}, nil
}
