package accuracy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	goredis "github.com/redis/go-redis/v9"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/natscast"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/enforcer/natsfeed"
	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/ingest/jetstream"
	embeddednats "github.com/weirhq/weir/internal/embedded/nats"
	embeddedredis "github.com/weirhq/weir/internal/embedded/redis"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/limits"
	"github.com/weirhq/weir/schemas"
)

// liveStaleAfter is a gateway's, as the product sets it.
const liveStaleAfter = 750 * time.Millisecond

// loops are goroutines that end together.
type loops struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

func (l *loops) start(ctx context.Context, runs ...func(context.Context) error) {
	ctx, l.cancel = context.WithCancel(ctx)
	for _, run := range runs {
		l.wg.Go(func() { _ = run(ctx) }) // what goes wrong while parts are down is the point of it
	}
}

func (l *loops) stop() {
	if l.cancel != nil {
		l.cancel()
		l.wg.Wait()
	}
}

// liveWeir is gateways and an aggregator over NATS and Redis, wired as in production but for ClickHouse and HTTP.
type liveWeir struct {
	sc       *scenario
	log      *slog.Logger
	dir      string
	nats     *embeddednats.Server
	redis    *embeddedredis.Server
	calls    redisCalls
	policy   *limits.Policy
	centreNC *nats.Conn
	centre   *loops
	mu       sync.RWMutex // gateways
	gateways []*liveGateway
}

type liveGateway struct {
	enforcer *enforcer.Enforcer
	feed     *natsfeed.Feed
	nc       *nats.Conn
	loops    loops
}

// startLiveWeir starts a fleet whose rule is kept with this consistency.
func startLiveWeir(c limits.Consistency) func(context.Context, LiveConfig, *scenario, int, *slog.Logger) (liveFleet, error) {
	return func(ctx context.Context, cfg LiveConfig, sc *scenario, _ int, log *slog.Logger) (liveFleet, error) {
		return newLiveWeir(ctx, cfg, sc, c, log)
	}
}

func newLiveWeir(ctx context.Context, cfg LiveConfig, sc *scenario, c limits.Consistency, log *slog.Logger) (_ liveFleet, err error) {
	f := &liveWeir{sc: sc, log: log, gateways: make([]*liveGateway, sc.most)}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.stop())
		}
	}()
	if f.dir, err = os.MkdirTemp(cfg.Dir, "weir-"); err != nil {
		return nil, err
	}
	if f.nats, err = embeddednats.Start(embeddednats.Config{Dir: filepath.Join(f.dir, "nats")}, log); err != nil {
		return nil, err
	}
	if f.redis, err = embeddedredis.Start(embeddedredis.Config{Dir: filepath.Join(f.dir, "redis"), Real: true}, log); err != nil {
		return nil, err
	}
	f.policy = &limits.Policy{Version: 1, Rules: []limits.Rule{{Name: "contract", Layer: limits.LayerContract,
		Key: []limits.Dimension{{Kind: limits.ByTenant}}, Consistency: c, Fixed: sc.limit()}}}
	f.calls.url = f.redis.URL()
	if f.centreNC, err = natsx.Connect(natsx.Config{URL: f.nats.URL(), Name: "centre"}, log, nil); err != nil {
		return nil, err
	}
	if err := f.startCentre(ctx); err != nil {
		return nil, err
	}
	for i := range sc.gateways {
		if err := f.startGateway(ctx, i); err != nil {
			return nil, err
		}
	}
	return f, f.awaitSync(ctx)
}

// awaitSync waits until the centre knows all gateways and they hear it.
func (f *liveWeir) awaitSync(ctx context.Context) error {
	select {
	case <-time.After(3 * time.Second): // the centre learns for 2 s
	case <-ctx.Done():
		return ctx.Err()
	}
	for deadline := time.Now().Add(20 * time.Second); ; {
		ready := true
		for _, g := range f.gateways {
			ready = ready && (g == nil || g.enforcer.Mode() == enforcer.Synced)
		}
		if ready {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.New("the gateways do not hear the centre")
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (f *liveWeir) startCentre(ctx context.Context) error {
	js, err := natsjs.New(f.centreNC)
	if err != nil {
		return err
	}
	declare := func(ctx context.Context) error { return natsx.Declare(ctx, js, natsx.Storage{}) }
	if err := declare(ctx); err != nil {
		return err
	}
	counter, err := redis.New(redis.Config{URL: f.redis.URL()})
	if err != nil {
		return err
	}
	agg := aggregator.New(aggregator.Config{}, counter, natscast.New(f.centreNC), f.log, nil)
	source, err := jetstream.NewSource(jetstream.Config{Name: "throttle", MaxDelay: time.Duration(batchDelay), Declare: declare}, f.centreNC,
		func(subject, contentType string, body []byte, arrived time.Time) (*schemas.Report, error) {
			return schemas.DecodeReport(subject, contentType, body, arrived)
		}, f.log, nil)
	if err != nil {
		return errors.Join(err, counter.Close())
	}
	f.centre = &loops{}
	f.centre.start(ctx, agg.Run, natscast.NewServer(f.centreNC, agg, f.log, nil).Run, func(ctx context.Context) error {
		defer func() { _ = counter.Close() }()
		return source.Consume(ctx, agg.Reports)
	})
	return nil
}

func (f *liveWeir) startGateway(ctx context.Context, i int) error {
	name := fmt.Sprintf("gw-%02d", i)
	boot := fmt.Sprintf("%s-%d", name, time.Now().UnixNano())
	g := &liveGateway{enforcer: enforcer.New(enforcer.Config{Fleet: f.sc.gateways, Ask: true, StaleAfter: liveStaleAfter})}
	g.enforcer.SetPolicy(f.policy)
	var err error
	if g.nc, err = natsx.Connect(natsx.Config{URL: f.nats.URL(), Name: name}, f.log, nil); err != nil {
		return err
	}
	pub, err := jetstream.NewPublisher(g.nc, name, nil)
	if err != nil {
		return err
	}
	reporter := ingest.New(ingest.Config{Clock: enforcer.Monotonic, PublishTimeout: time.Duration(publishTimeout), DrainTimeout: time.Second}, name, boot, g.enforcer, pub, f.log, nil)
	g.feed, err = natsfeed.New(natsfeed.Config{Gateway: name, Boot: boot, Silent: g.enforcer.Descend}, g.nc, g.enforcer.Apply,
		func() natsfeed.Status {
			return natsfeed.Status{Mode: g.enforcer.Mode(), PolicyVersion: 1, Weight: g.enforcer.Weight()}
		}, nil, f.log)
	if err != nil {
		return err
	}
	g.loops.start(ctx, reporter.Run, g.feed.Run)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gateways[i] = g
	return nil
}

func (f *liveWeir) ask(gateway, key int) (bool, error) {
	f.mu.RLock()
	g := f.gateways[gateway]
	f.mu.RUnlock()
	q, now := request(key), enforcer.Monotonic()
	d := g.enforcer.Check(now, q)
	if d.Asks() {
		d = g.enforcer.Settle(context.Background(), now, q, d, g.feed.Take)
	}
	return d.Allowed, nil
}

// sent counts all messages of the gateways' connections, acknowledgements and answers too.
func (f *liveWeir) sent() (sum traffic, err error) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, g := range f.gateways {
		if g != nil {
			n := g.nc.Stats()
			sum.messages += int64(n.InMsgs + n.OutMsgs)
			sum.bytes += int64(n.InBytes + n.OutBytes)
		}
	}
	sum.redis, err = f.calls.count()
	return sum, err
}

func (f *liveWeir) happen(h happening) error {
	ctx := context.Background()
	switch h.what {
	case centreDown:
		f.centre.stop()
	case centreUp:
		return f.startCentre(ctx)
	case redisDown, redisUp:
		return f.calls.happen(f.redis, h)
	case joins:
		return f.startGateway(ctx, h.gateway)
	case vanishes:
		f.gateways[h.gateway].nc.Close()
		f.gateways[h.gateway].loops.stop()
	case leaves:
		f.gateways[h.gateway].loops.stop()
	}
	return nil
}

func (f *liveWeir) stop() error {
	for _, g := range f.gateways {
		if g != nil {
			g.loops.stop()
			g.nc.Close()
		}
	}
	if f.centre != nil {
		f.centre.stop()
	}
	if f.centreNC != nil {
		f.centreNC.Close()
	}
	var err error
	if f.redis != nil {
		err = f.redis.Stop()
	}
	if f.nats != nil {
		f.nats.Stop()
	}
	return errors.Join(err, os.RemoveAll(f.dir))
}

// liveDivided is limit/N at each gateway.
type liveDivided struct {
	mu    sync.Mutex
	start time.Time
	world *world
	fleet *divided
}

func startLiveDivided(_ context.Context, _ LiveConfig, sc *scenario, _ int, _ *slog.Logger) (liveFleet, error) {
	w := &world{sc: sc, arrivals: make([]arrival, 1), admitted: make([]bool, 1)}
	return &liveDivided{start: time.Now(), world: w, fleet: newDivided(w).(*divided)}, nil
}

func (f *liveDivided) ask(gateway, key int) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.world.now = int64(time.Since(f.start))
	f.world.arrivals[0] = arrival{f.world.now, int32(gateway), int32(key)}
	f.fleet.ask(0)
	return f.world.admitted[0], nil
}

func (f *liveDivided) happen(h happening) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fleet.happen(h)
	return nil
}

func (f *liveDivided) sent() (traffic, error) { return traffic{}, nil }

func (f *liveDivided) stop() error { return nil }

// take is the generic cell rate algorithm by the clock of Redis, in µs. KEYS[1] is the bucket, ARGV the µs that a token takes and
// the burst. What is kept is the instant at which the bucket is full. It returns 1 when the request may pass.
var take = goredis.NewScript(`
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local full = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), now) + ARGV[1]
if full - now > ARGV[1] * ARGV[2] then return 0 end
redis.call('SET', KEYS[1], string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000) + 1000)
return 1`)

// liveCentral asks one bucket in Redis about each request.
type liveCentral struct {
	sc     *scenario
	dir    string
	redis  *embeddedredis.Server
	calls  redisCalls
	client *goredis.Client
}

func startLiveCentral(_ context.Context, cfg LiveConfig, sc *scenario, _ int, log *slog.Logger) (liveFleet, error) {
	dir, err := os.MkdirTemp(cfg.Dir, "redis-")
	if err != nil {
		return nil, err
	}
	server, err := embeddedredis.Start(embeddedredis.Config{Dir: dir, Real: true}, log)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	o, err := goredis.ParseURL(server.URL())
	if err != nil {
		return nil, errors.Join(err, server.Stop(), os.RemoveAll(dir))
	}
	o.PoolSize = 64
	return &liveCentral{sc: sc, dir: dir, redis: server, calls: redisCalls{url: server.URL()}, client: goredis.NewClient(o)}, nil
}

func (f *liveCentral) ask(_, key int) (bool, error) {
	perToken := f.sc.per.Microseconds() / f.sc.tokens
	n, err := take.Run(context.Background(), f.client, []string{fmt.Sprintf("take:%d", key)}, perToken, f.sc.burst).Int()
	return err != nil || n == 1, nil // without Redis requests pass
}

func (f *liveCentral) happen(h happening) error { return f.calls.happen(f.redis, h) }

// sent is 2 messages for each call: the question and the answer.
func (f *liveCentral) sent() (traffic, error) {
	n, err := f.calls.count()
	return traffic{messages: 2 * n, bytes: unknown, redis: n}, err
}

// redisCalls counts the calls of scripts that a Redis server has answered, over its deaths. Of the product's calls these are all but a
// few: one for each block of keys, and one for each request that is asked about.
type redisCalls struct {
	url  string
	past int64 // of earlier lives
}

var scriptCalls = regexp.MustCompile(`cmdstat_eval(?:sha)?:calls=(\d+)`)

func (c *redisCalls) count() (n int64, err error) {
	o, err := goredis.ParseURL(c.url)
	if err != nil {
		return 0, err
	}
	client := goredis.NewClient(o)
	defer func() { err = errors.Join(err, client.Close()) }()
	stats, err := client.Info(context.Background(), "commandstats").Result()
	if err != nil {
		return 0, fmt.Errorf("ask Redis what it was asked: %w", err)
	}
	n = c.past
	for _, m := range scriptCalls.FindAllStringSubmatch(stats, -1) {
		calls, err := strconv.ParseInt(m[1], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("ask Redis what it was asked: %w", err)
		}
		n += calls
	}
	return n, nil
}

// happen kills and restarts r.
func (c *redisCalls) happen(r *embeddedredis.Server, h happening) (err error) {
	switch h.what {
	case redisDown:
		if c.past, err = c.count(); err != nil {
			return err
		}
		return r.Kill()
	case redisUp:
		return r.Restart()
	}
	return nil
}

func (f *liveCentral) stop() error {
	return errors.Join(f.client.Close(), f.redis.Stop(), os.RemoveAll(f.dir))
}
