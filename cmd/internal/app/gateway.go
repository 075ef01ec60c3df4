package app

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/httpguard"
	"github.com/weirhq/weir/enforcer/natsfeed"
	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/ingest/spool"
	"github.com/weirhq/weir/internal/obs"
	"github.com/weirhq/weir/internal/run"
	"github.com/weirhq/weir/schemas"
)

// GatewayConfig says where a gateway stands. Name is required; another zero field means its default.
type GatewayConfig struct {
	Name      string           // last token of its subjects
	Addr      string           // listener of the reverse proxy; none without one
	CheckAddr string           // listener of the check API; none without one
	Upstream  *url.URL         // required with Addr
	Fleet     int              // gateways that share the limits, until the centre has said how many (1)
	Data      string           // folder for the spool and the little else that a gateway remembers; all in memory without one
	SpoolMax  int64            // bytes of reports on disk, from seal until the history has them (1 GiB)
	Now       func() time.Time // wall clock (time.Now)
	Clock     func() int64     // monotonic clock of the buckets (enforcer.Monotonic)

	Applied func(schemas.ThrottleUpdate) // told of each update once it is in force; may be nil
}

// Gateway decides about requests and reports what it decided. It works, and is ready, whether NATS is there or not.
type Gateway struct {
	Name, Boot string
	Guard      *httpguard.Guard
	Addr       string // of the reverse proxy, empty without one
	CheckAddr  string // of the check API, empty without one

	enforcer *enforcer.Enforcer
	reporter *ingest.Reporter
}

// publishTimeout is how long one attempt to store a report may take. The centre divides limits by reports: one that was lost on the
// way is not to hold up the next for long.
const publishTimeout = 300 * time.Millisecond

// staleAfter is how long the centre may be silent until that shows; it speaks each 250 ms.
const staleAfter = 750 * time.Millisecond

// NewGateway starts a gateway on the stack, over a connection that outlives it there.
func NewGateway(cfg GatewayConfig, policy *Policy, nc *nats.Conn, m *Metrics, stack *run.Stack, log *slog.Logger) (*Gateway, error) {
	if err := schemas.ValidName(cfg.Name); err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	base, log := log, log.With("gateway", cfg.Name) // the feed and the reporter name their gateway themselves
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Clock == nil {
		cfg.Clock = enforcer.Monotonic
	}
	fleetFile, fleet, err := lastFleet(cfg, log)
	if err != nil {
		return nil, err
	}
	g := &Gateway{Name: cfg.Name, Boot: rand.Text()}
	g.enforcer = enforcer.New(enforcer.Config{Fleet: fleet.Gateways, Weight: fleet.Weight, Ask: true, Clock: cfg.Clock, StaleAfter: staleAfter})
	policy.Enforce(g.enforcer)
	pub, err := jetstream.NewPublisher(nc, cfg.Name, m.streams)
	if err != nil {
		return nil, err
	}
	counting := ingest.Config{PolicyVersion: policy.Version, Clock: cfg.Clock, MaxPayload: pub.MaxPayload,
		PublishTimeout: publishTimeout, Left: func() time.Duration { return reportsEnd - stack.Stopping() }}
	without := func() []string { return nil }
	if cfg.Data != "" {
		kept, err := spool.Open(spool.Config{MaxBytes: cfg.SpoolMax}, spoolDir(cfg.Data, cfg.Name), cfg.Name, g.Boot, log, m.spool)
		switch {
		case err == nil:
			counting.Spool, counting.DrainTimeout = kept, drainTimeout
			without = func() []string {
				if kept.Troubled() {
					return []string{schemas.WithoutSpool}
				}
				return nil
			}
			stack.Defer("spool of "+cfg.Name, kept.Close)
		case errors.Is(err, spool.ErrInUse), errors.Is(err, spool.ErrNotOurs):
			return nil, fmt.Errorf("gateway %s: %w", cfg.Name, err)
		default: // requests matter more
			m.spool.Degraded.Inc()
			without = func() []string { return []string{schemas.WithoutSpool} }
			log.Error("usage waits in memory only: a kill loses what is not in the stream yet, and what is in the spool stays there", "err", err)
		}
	}
	g.reporter = ingest.New(counting, cfg.Name, g.Boot, g.enforcer, pub, base, m.ingest)
	apply := g.enforcer.Apply
	if cfg.Applied != nil {
		apply = func(u schemas.ThrottleUpdate) { g.enforcer.Apply(u); cfg.Applied(u) }
	}
	feed, err := natsfeed.New(natsfeed.Config{Gateway: cfg.Name, Boot: g.Boot, Version: obs.Version(), FleetFile: fleetFile, Silent: g.enforcer.Descend, Now: cfg.Now},
		nc, apply, func() natsfeed.Status {
			pending, _ := g.reporter.Pending()
			return natsfeed.Status{Mode: g.enforcer.Mode(), PolicyVersion: policy.Version(), Pending: uint64(pending), Sealed: g.reporter.Newest(), Weight: g.enforcer.Weight(), Without: without()}
		}, m.feed, base)
	if err != nil {
		return nil, err
	}
	settle := func(ctx context.Context, now int64, q *enforcer.Request, d enforcer.Decision) enforcer.Decision {
		return g.enforcer.Settle(ctx, now, q, d, feed.Take)
	}
	g.Guard = httpguard.New(httpguard.Config{Now: cfg.Now, Clock: cfg.Clock, Mode: g.enforcer.Mode, Settle: settle}, g.enforcer, policy.Current, g.reporter, m.guard, log)
	if cfg.Data != "" {
		stack.Go("spools beside that of "+cfg.Name, func(ctx context.Context) error {
			left := spoolsBeside(cfg.Data, cfg.Name, log)
			for wait := besideAfter; len(left) > 0; wait *= 2 {
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(wait):
					left = warnAbandoned(ctx, left, storedOf(nc), log)
				}
			}
			return nil
		})
	}
	// Stopping goes the other way: requests end, then the last counts are reported.
	stack.Go("reports of "+cfg.Name, g.reporter.Run)
	stack.Go("throttle feed of "+cfg.Name, feed.Run)
	if cfg.Addr != "" {
		proxy := httpguard.Proxy(cfg.Upstream, httpguard.ProxyConfig{Metrics: m.guard}, policy.Current, log)
		if g.Addr, err = listen("gateway "+cfg.Name, cfg.Addr, g.Guard.Wrap(proxy), stack, log); err != nil {
			return nil, err
		}
	}
	if cfg.CheckAddr != "" {
		mux := http.NewServeMux()
		mux.Handle("/v1/check", g.Guard.CheckHandler())
		if g.CheckAddr, err = listen("check API of "+cfg.Name, cfg.CheckAddr, mux, stack, log); err != nil {
			return nil, err
		}
	}
	return g, nil
}

// gatewayDir is where a gateway keeps what is its own under data, and spoolDir its spool there.
func gatewayDir(data, name string) string { return filepath.Join(data, "gateways", name) }

func spoolDir(data, name string) string { return filepath.Join(gatewayDir(data, name), "spool") }

// besideAfter is how long other gateways of the same folder may take to start until their spools count as left alone.
const besideAfter = 5 * time.Second

// spoolsBeside are the spools of other gateways under data.
func spoolsBeside(data, name string, log *slog.Logger) []string {
	dirs, err := filepath.Glob(spoolDir(data, "*"))
	if err != nil {
		log.Error("spools of other gateways are not looked for", "data", data, "err", err)
	}
	return slices.DeleteFunc(dirs, func(dir string) bool { return dir == spoolDir(data, name) })
}

// storedOf reads what the history has of a gateway.
func storedOf(nc *nats.Conn) func(ctx context.Context, gateway string) (*schemas.Stored, error) {
	return func(ctx context.Context, gateway string) (*schemas.Stored, error) {
		p, err := jetstream.NewPublisher(nc, gateway, nil)
		if err != nil {
			return nil, err
		}
		ctx, cancel := context.WithTimeout(ctx, besideAfter)
		defer cancel()
		_, stored, err := p.Stored(ctx)
		return stored, err
	}
}

// warnAbandoned tells of requests in spools that no process has and that the history lacks: only a gateway of that name delivers them, and
// where the name is a host's, none may ever come. It returns the spools of which nobody can say now what the history has.
func warnAbandoned(ctx context.Context, dirs []string, stored func(ctx context.Context, gateway string) (*schemas.Stored, error), log *slog.Logger) (left []string) {
	for _, dir := range dirs {
		gateways, name := filepath.Split(filepath.Dir(dir))
		all, err := spool.Abandoned(dir, name)
		if err != nil {
			log.Warn("the spool of another gateway cannot be read", "of", name, "spool", dir, "err", err)
			continue
		}
		if len(all) == 0 {
			continue
		}
		of := all[0].Gateway
		has, err := stored(ctx, of)
		if err != nil {
			left = append(left, dir)
			continue
		}
		var requests uint64
		for _, r := range all {
			if !has.Has(r.Boot, r.Seq) {
				requests += r.Requests()
			}
		}
		if requests > 0 {
			log.Warn("usage of a gateway that does not run lies here, and the history does not have it: start a gateway with this --data and --name "+of+", which delivers it",
				"of", of, "requests", requests, "spool", dir, "its_place", filepath.Join(gateways, of, "spool"))
		}
	}
	return left
}

// lastFleet is the file where is kept what is known of the fleet, and what to begin with: what an earlier life was told, unless
// the operator says that there are more gateways by now.
func lastFleet(cfg GatewayConfig, log *slog.Logger) (file string, fleet natsfeed.Fleet, err error) {
	fleet.Gateways = max(cfg.Fleet, 1)
	if cfg.Data == "" {
		return "", fleet, nil
	}
	dir := gatewayDir(cfg.Data, cfg.Name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fleet, fmt.Errorf("make the folder of gateway %s: %w", cfg.Name, err)
	}
	file = filepath.Join(dir, "fleet")
	known, err := natsfeed.ReadFleet(file)
	if err != nil {
		log.Warn("the last known fleet is not used", "gateways", fleet.Gateways, "err", err)
	}
	if known.Gateways >= fleet.Gateways {
		fleet = known
	}
	return file, fleet, nil
}

// Ready says that the gateway can decide, which needs nobody else.
func (g *Gateway) Ready() error {
	if g.enforcer.Policy() == nil {
		return errors.New("no policy in force")
	}
	return nil
}

// How a gateway shares the time that it has to stop, StopTimeout, among what may hold it up.
const (
	// requestsEnd is when requests in flight are cut off.
	requestsEnd = 5 * time.Second
	// requestsMin is what they have at least, also when those of another listener have taken all.
	requestsMin = 500 * time.Millisecond
	// drainTimeout is how long what is on disk anyway is sent.
	drainTimeout = 4 * time.Second
	// reportsEnd is when no more is sent.
	reportsEnd = 7500 * time.Millisecond
)

// listen serves h on addr; stopping waits for the requests in flight, for a bounded time. It returns the real address.
func listen(name, addr string, h http.Handler, stack *run.Stack, log *slog.Logger) (string, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return "", fmt.Errorf("%s: listen on %s: %w", name, addr, err)
	}
	srv := httpguard.Server(addr, h, log)
	stack.Go(name, func(ctx context.Context) error {
		idle := make(chan error, 1)
		stop := context.AfterFunc(ctx, func() {
			// The listener closes at once; the timeout is for requests in flight, which ctx must not cut off.
			left := max(requestsEnd-stack.Stopping(), requestsMin)
			timeout, cancel := context.WithTimeout(context.WithoutCancel(ctx), left)
			defer cancel()
			err := srv.Shutdown(timeout)
			if err != nil {
				log.Warn("requests in flight were cut off", "listener", name, "after", left.Round(time.Millisecond))
				_ = srv.Close()
			}
			idle <- nil
		})
		if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			stop()
			return fmt.Errorf("%s: %w", name, err)
		}
		return <-idle
	})
	return ln.Addr().String(), nil
}
