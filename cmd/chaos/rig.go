package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	goredis "github.com/redis/go-redis/v9"

	"github.com/weirhq/weir/aggregator"
	rediscounter "github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/embedded/clickhouse"
	"github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/embedded/redis"
	"github.com/weirhq/weir/internal/faultproxy"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// rig is one pipeline of real processes, with a fault proxy in every link.
type rig struct {
	dir     string
	binary  string
	log     *slog.Logger
	parts   map[string]part
	weirs   map[string]*weir
	links   map[string]*faultproxy.Proxy
	servers struct{ nats, redis, clickhouse string } // without a proxy
	cleanup []func()

	mu    sync.Mutex // guards notes
	notes []string   // what nobody should see
}

func (r *rig) note(s string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notes = append(r.notes, s)
	r.log.Error(s)
}

func (r *rig) noted() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.notes
}

// newRig starts everything. After an error, close what there is.
func newRig(dir, binary string, p plan) (*rig, error) {
	r := &rig{dir: dir, binary: binary, parts: map[string]part{}, weirs: map[string]*weir{}, links: map[string]*faultproxy.Proxy{}}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return r, err
	}
	logFile, err := os.Create(filepath.Join(dir, "rig.log"))
	if err != nil {
		return r, err
	}
	r.onClose(func() { _ = logFile.Close() })
	r.log = slog.New(slog.NewTextHandler(logFile, nil))
	if err := os.WriteFile(filepath.Join(dir, "plan.txt"), []byte(p.String()), 0o644); err != nil {
		return r, err
	}
	policy := filepath.Join(dir, "policy.yaml")
	if err := os.WriteFile(policy, []byte(policyText), 0o644); err != nil {
		return r, err
	}
	if err := r.startServers(); err != nil {
		return r, err
	}
	up, upURL, err := upstream()
	if err != nil {
		return r, err
	}
	r.onClose(func() { _ = up.Close() })

	// The clients reach each server through a proxy of their own.
	for _, l := range [][3]string{
		{"aggregator", "nats", r.servers.nats}, {"aggregator", "redis", r.servers.redis},
		{"aggregator", "clickhouse", r.servers.clickhouse}, {"alerter", "nats", r.servers.nats},
	} {
		if err := r.link(l[0], l[1], hostPort(l[2])); err != nil {
			return r, err
		}
	}
	if out, err := r.command("migrate", "--clickhouse", r.servers.clickhouse).CombinedOutput(); err != nil {
		return r, fmt.Errorf("migrate: %w: %s", err, out)
	}
	if err := r.run("aggregator", "aggregator", "--nats", r.at("aggregator", "nats", r.servers.nats), "--redis", r.at("aggregator", "redis", r.servers.redis),
		"--clickhouse", r.at("aggregator", "clickhouse", r.servers.clickhouse)); err != nil {
		return r, err
	}
	if err := r.run("alerter", "alerter", "--nats", r.at("alerter", "nats", r.servers.nats)); err != nil {
		return r, err
	}
	for _, name := range p.names() {
		if err := r.link(name, "nats", hostPort(r.servers.nats)); err != nil {
			return r, err
		}
		port, err := freePort()
		if err != nil {
			return r, err
		}
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		if err := r.link("load", name, addr); err != nil {
			return r, err
		}
		if err := r.run(name, "gateway", "--name", name, "--nats", r.at(name, "nats", r.servers.nats), "--policy", policy, "--upstream", upURL.String(),
			"--gateway-addr", addr, "--check-addr", "127.0.0.1:0", "--fleet", strconv.Itoa(p.Gateways)); err != nil {
			return r, err
		}
		if err := awaitListener(addr, 15*time.Second); err != nil {
			return r, fmt.Errorf("%s: %w", name, err)
		}
	}
	return r, nil
}

func (r *rig) onClose(f func()) { r.cleanup = append(r.cleanup, f) }

// close ends everything, the last thing first.
func (r *rig) close() {
	for i := len(r.cleanup) - 1; i >= 0; i-- {
		r.cleanup[i]()
	}
	r.cleanup = nil
}

func (r *rig) startServers() error {
	ports := [3]int{}
	for i := range ports {
		var err error
		if ports[i], err = freePort(); err != nil {
			return err
		}
	}
	ended := func(what string, stop func() error) func() {
		return func() {
			if err := stop(); err != nil {
				r.note(fmt.Sprintf("%s: %v", what, err))
			}
		}
	}
	ch, err := clickhouse.Start(clickhouse.Config{Dir: filepath.Join(r.dir, "clickhouse"), Port: ports[0], Database: "weir"}, r.log)
	if err != nil {
		return err
	}
	r.onClose(ended("ClickHouse", ch.Kill))
	ns, err := nats.StartProcess(nats.Config{Dir: filepath.Join(r.dir, "nats"), Port: ports[1]}, r.log)
	if err != nil {
		return err
	}
	r.onClose(ended("NATS", ns.Kill))
	rd, err := redis.Start(redis.Config{Dir: filepath.Join(r.dir, "redis"), Port: ports[2], AppendOnly: true, Real: true}, r.log)
	if err != nil {
		return err
	}
	r.onClose(ended("Redis", rd.Kill))
	r.parts["clickhouse"], r.parts["nats"], r.parts["redis"] = ch, ns, rd
	r.servers.clickhouse, r.servers.nats, r.servers.redis = ch.URL(), ns.URL(), rd.URL()
	return nil
}

// link puts a proxy between a client and a server.
func (r *rig) link(client, server, target string) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	p, err := faultproxy.Start(net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), target)
	if err != nil {
		return err
	}
	r.onClose(p.Close)
	r.links[link(client, server)] = p
	return nil
}

// at is url by way of the proxy.
func (r *rig) at(client, server, url string) string {
	return strings.Replace(url, hostPort(url), r.links[link(client, server)].Addr(), 1)
}

// hostPort is that of a URL.
func hostPort(url string) string {
	_, rest, _ := strings.Cut(url, "://")
	host, _, _ := strings.Cut(rest, "/")
	return host
}

// command is weir with arguments, in an environment without settings of weir.
func (r *rig) command(args ...string) *exec.Cmd {
	cmd := exec.Command(r.binary, args...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "WEIR_") || strings.HasPrefix(v, "WEIR_LIBCHDB=") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	return cmd
}

// run starts a supervised weir with a data folder of its own.
func (r *rig) run(name string, args ...string) error {
	file, err := os.Create(filepath.Join(r.dir, name+".log"))
	if err != nil {
		return err
	}
	args = append(args, "--data", filepath.Join(r.dir, name), "--metrics-addr", "127.0.0.1:0")
	w := &weir{name: name, log: file, note: r.note, cmd: func() *exec.Cmd { return r.command(args...) }}
	if err := w.Restart(); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", name, err), file.Close())
	}
	r.onClose(w.close)
	r.weirs[name], r.parts[name] = w, w
	return nil
}

// Ports of what must come back on the same one lie below those that the kernel gives out.
var ports = struct {
	sync.Mutex
	taken map[int]bool
}{taken: map[int]bool{}}

// freePort is a port on 127.0.0.1 that was free a moment ago and that we have not used.
func freePort() (int, error) {
	ports.Lock()
	defer ports.Unlock()
	var last error
	for range 1000 {
		port := 20000 + rand.IntN(12000)
		if ports.taken[port] {
			continue
		}
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			last = err
			continue
		}
		if err := l.Close(); err != nil {
			return 0, err
		}
		ports.taken[port] = true
		return port, nil
	}
	return 0, fmt.Errorf("no free port: %w", last)
}

func awaitListener(addr string, within time.Duration) error {
	for deadline := time.Now().Add(within); ; time.Sleep(10 * time.Millisecond) {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err == nil {
			return c.Close()
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("nobody listens on %s after %s: %w", addr, within, err)
		}
	}
}

// disturb lets the plan's faults happen, each target's one after another, and returns when the last is over and everything
// runs again.
func (r *rig) disturb(p plan) {
	began := time.Now()
	byTarget := map[string][]fault{}
	for _, f := range p.Faults {
		byTarget[f.Target] = append(byTarget[f.Target], f)
	}
	var all sync.WaitGroup
	for target, faults := range byTarget {
		all.Go(func() {
			for _, f := range faults {
				time.Sleep(time.Until(began.Add(f.At)))
				r.log.Info("fault", "target", target, "kind", f.Kind, "for", f.For, "n", f.N)
				if l, ok := r.links[target]; ok {
					disturbLink(l, f)
				} else if err := r.disturbPart(r.parts[target], f); err != nil {
					r.note(fmt.Sprintf("%s %s: %v", f.Kind, target, err))
				}
			}
		})
	}
	all.Wait()
	for name, part := range r.weirs { // also one that has given up
		if err := part.Restart(); err != nil {
			r.note(fmt.Sprintf("restart %s: %v", name, err))
		}
	}
}

func (r *rig) disturbPart(p part, f fault) error {
	switch f.Kind {
	case kill:
		err := p.Kill()
		time.Sleep(f.For)
		return errors.Join(err, p.Restart())
	case term:
		_, err := p.(*weir).Term() // any exit code: it may have been cut off from everything
		time.Sleep(f.For)
		return errors.Join(err, p.Restart())
	case pause:
		err := p.Pause()
		time.Sleep(f.For)
		return errors.Join(err, p.Resume())
	case flush, forget:
		opt, err := goredis.ParseURL(r.servers.redis)
		if err != nil {
			return err
		}
		c := goredis.NewClient(opt)
		defer func() { _ = c.Close() }()
		if f.Kind == flush {
			return c.FlushAll(context.Background()).Err()
		}
		return c.ScriptFlush(context.Background()).Err()
	}
	return fmt.Errorf("a part cannot be %s", f.Kind)
}

func disturbLink(l *faultproxy.Proxy, f fault) {
	var set faultproxy.Faults
	switch f.Kind {
	case cut, reset:
		l.Cut(f.Kind == reset)
		return
	case swallowA:
		l.Swallow()
		return
	case refuse:
		set.Refuse = true
	case hold:
		set.Hold = true
	case slow:
		set.Delay[faultproxy.Down] = time.Duration(f.N) * time.Millisecond
	case cutUp:
		set.CutAfter[faultproxy.Up] = f.N
	case cutDown:
		set.CutAfter[faultproxy.Down] = f.N
	}
	l.Set(set)
	if f.Kind == refuse {
		l.Cut(true)
	}
	time.Sleep(f.For)
	l.Set(faultproxy.Faults{})
}

// drainWithin bounds the time from the last fault until everything is stored.
const drainWithin = 90 * time.Second

// drain ends the gateways, which report what they have left, and waits until both readers of the stream have read it all.
func (r *rig) drain(names []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), drainWithin)
	defer cancel()
	var all sync.WaitGroup
	errs := make([]error, len(names))
	for i, name := range names {
		all.Go(func() { errs[i] = r.drainGateway(ctx, r.weirs[name]) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	nc, err := natsgo.Connect(r.servers.nats)
	if err != nil {
		return fmt.Errorf("drain: %w", err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		return err
	}
	for {
		left, err := behind(ctx, js)
		if err == nil && left == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("not drained after %s: %s", drainWithin, left), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// drainGateway ends a gateway, again and again until it says that it has nothing left.
func (r *rig) drainGateway(ctx context.Context, w *weir) error {
	for ctx.Err() == nil {
		code, err := w.Term()
		if err != nil || code == 0 {
			return err
		}
		r.log.Warn("gateway ended with something left", "gateway", w.name, "code", code)
		if err := w.Restart(); err != nil {
			return err
		}
		time.Sleep(500 * time.Millisecond)
	}
	return fmt.Errorf("%s has something left after %s", w.name, drainWithin)
}

// behind says what of the stream is not yet read.
func behind(ctx context.Context, js natsjs.JetStream) (string, error) {
	stream, err := js.Stream(ctx, schemas.UsageStream)
	if err != nil {
		return "", err
	}
	last := stream.CachedInfo().State.LastSeq
	kv, err := js.KeyValue(ctx, natsx.HistoryBucket)
	if err != nil {
		return "", err
	}
	var position struct{ Floor uint64 }
	entry, err := kv.Get(ctx, "history")
	if err != nil && !errors.Is(err, natsjs.ErrKeyNotFound) {
		return "", err
	}
	if err == nil {
		if err := json.Unmarshal(entry.Value(), &position); err != nil {
			return "", err
		}
	}
	if position.Floor < last {
		return fmt.Sprintf("history is at %d of %d", position.Floor, last), nil
	}
	consumer, err := stream.Consumer(ctx, "throttle")
	if err != nil {
		return "", err
	}
	if i := consumer.CachedInfo(); i.NumPending > 0 || i.NumAckPending > 0 {
		return fmt.Sprintf("throttling has %d messages to come and %d in hand", i.NumPending, i.NumAckPending), nil
	}
	return "", nil
}

// dead is the number of messages that nobody could read.
func (r *rig) dead() (uint64, error) {
	nc, err := natsgo.Connect(r.servers.nats)
	if err != nil {
		return 0, err
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	stream, err := js.Stream(ctx, schemas.DeadStream)
	if err != nil {
		return 0, err
	}
	return stream.CachedInfo().State.Msgs, nil
}

// query asks ClickHouse for rows, without any of weir's code.
func (r *rig) query(sql string) ([][]string, error) {
	base, db, _ := strings.Cut(strings.TrimPrefix(r.servers.clickhouse, "http://"), "/")
	resp, err := http.Post("http://"+base+"/?database="+db, "text/plain", strings.NewReader(sql+" FORMAT JSONCompactEachRow"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		b, err := io.ReadAll(resp.Body)
		return nil, errors.Join(fmt.Errorf("%s: %s %s", sql, resp.Status, b), err)
	}
	var rows [][]string
	for dec := json.NewDecoder(resp.Body); ; {
		var row []string
		if err := dec.Decode(&row); errors.Is(err, io.EOF) {
			return rows, nil
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", sql, err)
		}
		rows = append(rows, row)
	}
}

// stored is what the history has, by cell and outcome.
func (r *rig) stored() (map[cell]outcomes, error) {
	rows, err := r.query("SELECT gateway, tenant, route, rule, toString(sum(allowed) + sum(rejected)), toString(sum(if(rule = '', rejected, allowed))) FROM usage FINAL GROUP BY gateway, tenant, route, rule")
	if err != nil {
		return nil, err
	}
	all := map[cell]outcomes{}
	for _, row := range rows {
		if row[5] != "0" {
			return nil, fmt.Errorf("usage of %v has %s requests under the wrong outcome", row[:4], row[5])
		}
		n, err := strconv.ParseUint(row[4], 10, 64)
		if err != nil {
			return nil, err
		}
		c := cell{row[0], row[1], row[2]}
		if all[c] == nil {
			all[c] = outcomes{}
		}
		all[c][row[3]] += n
	}
	return all, nil
}

// rollups are what the tables that are sums of usage should have and do not.
func (r *rig) rollups() (wrong []string, err error) {
	const sums = "SELECT tenant, route, rule, toString(sum(allowed)), toString(sum(rejected)), toString(sum(cost)) FROM %s GROUP BY tenant, route, rule ORDER BY tenant, route, rule"
	want, err := r.query(fmt.Sprintf(sums, "usage FINAL"))
	if err != nil {
		return nil, err
	}
	for _, table := range []string{"usage_1m", "usage_1h", "usage_1d"} {
		have, err := r.query(fmt.Sprintf(sums, table))
		if err != nil {
			return nil, err
		}
		if fmt.Sprint(have) != fmt.Sprint(want) {
			wrong = append(wrong, fmt.Sprintf("%s is not the sum of usage: have %v, want %v", table, have, want))
		}
	}
	return wrong, nil
}

// totals are Redis' totals of the contract rule by tenant. A bucket that is full again is forgotten a minute later.
func (r *rig) totals() (map[string]uint64, error) {
	c, err := rediscounter.New(rediscounter.Config{URL: r.servers.redis})
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	all := map[string]uint64{}
	key := strings.NewReplacer("%", "%25", "|", "%7C") // the two bytes that a key of one part escapes
	for i := range tenants {
		n, err := c.Total(context.Background(), aggregator.Key{Rule: "contract", Key: key.Replace(tenantName(i))})
		if err != nil {
			return nil, err
		}
		all[tenantName(i)] = uint64(n)
	}
	return all, nil
}
