// Package rig runs the whole pipeline as real processes for tests that break it: servers that can be killed and frozen, a fault
// proxy in every link, and a load generator whose journal says what must be stored.
package rig

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
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
	"syscall"
	"time"

	"github.com/weirhq/weir/internal/embedded/clickhouse"
	"github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/embedded/redis"
	"github.com/weirhq/weir/internal/faultproxy"
)

// Names of the parts. Those of gateways are in Rig.Gateways.
const (
	NATS       = "nats"
	Redis      = "redis"
	ClickHouse = "clickhouse"
	Aggregator = "aggregator"
	Alerter    = "alerter"
	Standby    = "standby" // another alerter
	Load       = "load"    // the client side of a link to a gateway
)

// Config says what runs. Dir and Binary are required.
type Config struct {
	Dir      string            // logs and data
	Binary   string            // the weir
	Gateways int               // (1)
	Policy   string            // of the gateways (Policy)
	Down     string            // a part that is not there when the others start; Restart brings it
	Standby  bool              // a second alerter
	Webhook  string            // of on-call (none)
	Hold     time.Duration     // before an alert is resolved (that of weir)
	Secret   string            // that signs what goes there
	Stores   map[string]string // folders for the data of parts, by name (in Dir)
}

// Rig is one pipeline. Its methods may be called from any goroutine.
type Rig struct {
	Parts    map[string]Part              // by name
	Weirs    map[string]*Weir             // those of Parts that are no servers
	Links    map[string]*faultproxy.Proxy // by the name that Link gives
	Gateways map[string][]string          // name to host:port, its own and that of the proxy before it
	Log      *slog.Logger                 // into Dir/rig.log

	cfg     Config
	servers struct{ nats, redis, clickhouse string } // without a proxy
	metrics map[string]string                        // of each weir
	cleanup []func()

	mu    sync.Mutex // guards notes
	notes []string   // what nobody should see
}

// Link names the way of a client to a server, or of Load to a gateway.
func Link(client, server string) string { return client + ">" + server }

// GatewayName is the name of the i-th gateway, counted from 1.
func GatewayName(i int) string { return fmt.Sprintf("gw%d", i) }

// Note keeps a line about what nobody should see.
func (r *Rig) Note(s string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notes = append(r.notes, s)
	r.Log.Error(s)
}

// Notes are the lines of Note.
func (r *Rig) Notes() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.notes
}

// New starts everything. After an error, Close what there is.
func New(cfg Config) (*Rig, error) {
	r := &Rig{cfg: cfg, Parts: map[string]Part{}, Weirs: map[string]*Weir{}, Links: map[string]*faultproxy.Proxy{}, Gateways: map[string][]string{},
		metrics: map[string]string{}, Log: slog.New(slog.DiscardHandler)}
	r.cfg.Gateways = max(cfg.Gateways, 1)
	if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
		return r, err
	}
	logFile, err := os.Create(filepath.Join(cfg.Dir, "rig.log"))
	if err != nil {
		return r, err
	}
	r.onClose(func() { _ = logFile.Close() })
	r.Log = slog.New(slog.NewTextHandler(logFile, nil))
	if err := r.startServers(); err != nil {
		return r, err
	}
	return r, r.startWeirs()
}

func (r *Rig) onClose(f func()) { r.cleanup = append(r.cleanup, f) }

// Close ends everything, the last thing first. It may be called twice.
func (r *Rig) Close() {
	for i := len(r.cleanup) - 1; i >= 0; i-- {
		r.cleanup[i]()
	}
	r.cleanup = nil
}

func (r *Rig) startServers() error {
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
				r.Note(fmt.Sprintf("%s: %v", what, err))
			}
		}
	}
	ch, err := clickhouse.Start(clickhouse.Config{Dir: r.store(ClickHouse), Port: ports[0], Database: "weir"}, r.Log)
	if err != nil {
		return err
	}
	r.onClose(ended(ClickHouse, ch.Kill))
	ns, err := nats.StartProcess(nats.Config{Dir: r.store(NATS), Port: ports[1]}, r.Log)
	if err != nil {
		return err
	}
	r.onClose(ended(NATS, ns.Kill))
	rd, err := redis.Start(redis.Config{Dir: r.store(Redis), Port: ports[2], AppendOnly: true, Real: true}, r.Log)
	if err != nil {
		return err
	}
	r.onClose(ended(Redis, rd.Kill))
	r.Parts[ClickHouse], r.Parts[NATS], r.Parts[Redis] = ch, ns, rd
	r.servers.clickhouse, r.servers.nats, r.servers.redis = ch.URL(), ns.URL(), rd.URL()
	if out, err := r.command("migrate", "--clickhouse", r.servers.clickhouse).CombinedOutput(); err != nil {
		return fmt.Errorf("migrate: %w: %s", err, out)
	}
	if p, ok := r.Parts[r.cfg.Down]; ok {
		return p.Kill()
	}
	return nil
}

// Dir is the folder of logs, each in the name of its process.
func (r *Rig) Dir() string { return r.cfg.Dir }

// store is the folder for the data of a part.
func (r *Rig) store(name string) string {
	return cmp.Or(r.cfg.Stores[name], filepath.Join(r.cfg.Dir, name))
}

// startWeirs starts what reaches each server through a proxy of its own.
func (r *Rig) startWeirs() error {
	policy := filepath.Join(r.cfg.Dir, "policy.yaml")
	if err := os.WriteFile(policy, []byte(cmp.Or(r.cfg.Policy, Policy)), 0o644); err != nil {
		return err
	}
	up, api, err := upstream()
	if err != nil {
		return err
	}
	r.onClose(func() { _ = up.Close() })
	for _, l := range [][3]string{
		{Aggregator, NATS, r.servers.nats}, {Aggregator, Redis, r.servers.redis}, {Aggregator, ClickHouse, r.servers.clickhouse}, {Alerter, NATS, r.servers.nats}, {Standby, NATS, r.servers.nats},
	} {
		if err := r.link(l[0], l[1], hostPort(l[2])); err != nil {
			return err
		}
	}
	if err := r.run(Aggregator, "aggregator", "--nats", r.at(Aggregator, NATS, r.servers.nats), "--redis", r.at(Aggregator, Redis, r.servers.redis),
		"--clickhouse", r.at(Aggregator, ClickHouse, r.servers.clickhouse)); err != nil {
		return err
	}
	for _, name := range []string{Alerter, Standby} {
		if name == Standby && !r.cfg.Standby {
			continue
		}
		args := []string{"alerter", "--nats", r.at(name, NATS, r.servers.nats)}
		if r.cfg.Webhook != "" {
			args = append(args, "--webhook", r.cfg.Webhook)
		}
		if r.cfg.Hold > 0 {
			args = append(args, "--hold", r.cfg.Hold.String())
		}
		if err := r.run(name, args...); err != nil {
			return err
		}
	}
	for i := range r.cfg.Gateways {
		name := GatewayName(i + 1)
		port, err := freePort()
		if err != nil {
			return err
		}
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		if err := errors.Join(r.link(name, NATS, hostPort(r.servers.nats)), r.link(Load, name, addr)); err != nil {
			return err
		}
		if err := r.run(name, "gateway", "--name", name, "--nats", r.at(name, NATS, r.servers.nats), "--policy", policy, "--upstream", api,
			"--gateway-addr", addr, "--check-addr", "127.0.0.1:0", "--fleet", strconv.Itoa(r.cfg.Gateways)); err != nil {
			return err
		}
		r.Gateways[name] = []string{addr, r.Links[Link(Load, name)].Addr()}
		if err := awaitListener(addr, 15*time.Second); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// link puts a proxy between a client and a server.
func (r *Rig) link(client, server, target string) error {
	var p *faultproxy.Proxy
	for {
		port, err := freePort()
		if err != nil {
			return err
		}
		if p, err = faultproxy.Start(net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), target); err == nil {
			break
		}
		if !errors.Is(err, syscall.EADDRINUSE) { // somebody else took it just now
			return err
		}
	}
	r.onClose(p.Close)
	r.Links[Link(client, server)] = p
	return nil
}

// at is url by way of the proxy.
func (r *Rig) at(client, server, url string) string {
	return strings.Replace(url, hostPort(url), r.Links[Link(client, server)].Addr(), 1)
}

// hostPort is that of a URL.
func hostPort(url string) string {
	_, rest, _ := strings.Cut(url, "://")
	host, _, _ := strings.Cut(rest, "/")
	return host
}

// command is weir with arguments, in an environment without settings of weir but ours.
func (r *Rig) command(args ...string) *exec.Cmd {
	cmd := exec.Command(r.cfg.Binary, args...)
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "WEIR_") || strings.HasPrefix(v, "WEIR_LIBCHDB=") {
			cmd.Env = append(cmd.Env, v)
		}
	}
	if r.cfg.Secret != "" {
		cmd.Env = append(cmd.Env, "WEIR_WEBHOOK_SECRET="+r.cfg.Secret)
	}
	return cmd
}

// run starts a supervised weir with a data folder of its own, unless it is to be down.
func (r *Rig) run(name string, args ...string) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	r.metrics[name] = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	file, err := os.Create(filepath.Join(r.cfg.Dir, name+".log"))
	if err != nil {
		return err
	}
	args = append(args, "--data", r.store(name), "--metrics-addr", r.metrics[name])
	w := &Weir{name: name, log: file, note: r.Note, cmd: func() *exec.Cmd { return r.command(args...) }}
	r.onClose(w.close)
	r.Weirs[name], r.Parts[name] = w, w
	if r.cfg.Down == name {
		return nil
	}
	return w.Restart()
}

// Metric is the value of a series of a weir, named as in its text form, and 0 when it has no such series. A process that does
// not answer is an error.
func (r *Rig) Metric(name, series string) (float64, error) {
	client := http.Client{Timeout: 2 * time.Second}
	resp, err := client.Get("http://" + r.metrics[name] + "/metrics")
	if err != nil {
		return 0, fmt.Errorf("metrics of %s: %w", name, err)
	}
	defer func() { _ = resp.Body.Close() }()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if v, ok := strings.CutPrefix(lines.Text(), series+" "); ok {
			return strconv.ParseFloat(v, 64)
		}
	}
	return 0, lines.Err()
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
