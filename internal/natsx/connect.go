// Package natsx connects weir to NATS and declares the streams and buckets that it lives on.
package natsx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
)

// ErrUnreachable is in the chain of the error when a server is not there, or will not let us in.
var ErrUnreachable = errors.New("unreachable")

// Config says how to reach the servers. A zero field means its default.
type Config struct {
	URL         string        // one or more, separated by commas; may hold user and password, or a token
	Name        string        // of this connection, shown by the server ("weir")
	InboxPrefix string        // of request replies, for accounts that may not use the shared one ("_INBOX")
	Timeout     time.Duration // of one attempt to connect (2s)
	RetryWait   time.Duration // between attempts, and as much again at random (500ms)
	LogEvery    time.Duration // while an outage lasts it is told once, then summarised this often (1m)
}

// DefaultURL is where a server is looked for when nothing else is said.
const DefaultURL = nats.DefaultURL

func (c Config) withDefaults() Config {
	if c.URL == "" {
		c.URL = DefaultURL
	}
	if c.Name == "" {
		c.Name = "weir"
	}
	if c.Timeout == 0 {
		c.Timeout = 2 * time.Second
	}
	if c.RetryWait == 0 {
		c.RetryWait = 500 * time.Millisecond
	}
	if c.LogEvery == 0 {
		c.LogEvery = time.Minute
	}
	return c
}

// Metrics are shared by every connection of a process.
type Metrics struct {
	Errors    *prometheus.CounterVec // reason: permission, auth, slow_consumer, disconnect, other
	Connected prometheus.Gauge       // connections that are up
	Degraded  prometheus.Gauge       // raised by one for each connection that is down
}

// NewMetrics registers the metrics with reg. Degraded is a gauge of its own until the wiring puts the shared one there.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		Errors: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_nats_errors_total",
			Help: "What went wrong on connections to NATS. permission and auth are mistakes in the configuration."}, []string{"reason"}),
		Connected: prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_nats_connected", Help: "Connections to NATS that are up."}),
		Degraded:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_nats_degraded", Help: "Connections to NATS that are down."}),
	}
	for _, r := range []string{"permission", "auth", "slow_consumer", "disconnect", "other"} {
		m.Errors.WithLabelValues(r)
	}
	reg.MustRegister(m.Errors, m.Connected)
	return m
}

// Connect returns a connection at once (after probeTimeout when a server says nothing) and keeps trying for ever, also when the server
// is not there yet, hangs, has gone or refuses the credentials (they may be put right there). While it is down, publishing fails
// immediately: nothing is kept back to be sent late. m may be nil.
func Connect(cfg Config, log *slog.Logger, m *Metrics) (*nats.Conn, error) {
	cfg = cfg.withDefaults()
	l, err := newLink(cfg, log, m)
	if err != nil {
		return nil, err
	}
	l.shun = l.silent() // the client tries each server once before it returns
	nc, err := nats.Connect(cfg.URL, append(l.options(), nats.RetryOnFailedConnect(true))...)
	l.given()
	if err != nil {
		return nil, fmt.Errorf("connect to NATS at %s: %w", l.where, err)
	}
	if !nc.IsConnected() {
		l.down(nc.LastError())
	}
	return nc, nil
}

// probeTimeout is how long a start waits for a word of each server.
const probeTimeout = 250 * time.Millisecond

var errSilent = errors.New("a server says nothing")

// silent says whether one of the servers neither greets, as a server of NATS does at once, nor refuses the connection.
func (l *link) silent() bool {
	all := strings.Split(l.cfg.URL, ",")
	found := make(chan bool, len(all))
	for _, one := range all {
		go func() { found <- mute(one, probeTimeout) }()
	}
	silent := false
	for range all {
		silent = <-found || silent
	}
	return silent
}

func mute(address string, within time.Duration) bool {
	u, err := parse(address)
	if err != nil {
		return false
	}
	host := u.Host
	if u.Port() == "" {
		host = net.JoinHostPort(u.Hostname(), strconv.Itoa(nats.DefaultPort))
	}
	conn, err := net.DialTimeout("tcp", host, within)
	if err != nil {
		var e net.Error
		return errors.As(err, &e) && e.Timeout()
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetReadDeadline(time.Now().Add(within))
	_, err = conn.Read(make([]byte, 1))
	return errors.Is(err, os.ErrDeadlineExceeded)
}

// ConnectCheck is Connect for a start that must not go on without the server: it returns a connection that is up, or,
// once ctx is done or the server has refused the credentials, an error with ErrUnreachable in its chain.
func ConnectCheck(ctx context.Context, cfg Config, log *slog.Logger, m *Metrics) (*nats.Conn, error) {
	cfg = cfg.withDefaults()
	l, err := newLink(cfg, log, m)
	if err != nil {
		return nil, err
	}
	for {
		nc, err := nats.Connect(cfg.URL, append(l.options(), nats.RetryOnFailedConnect(false))...)
		switch {
		case err == nil:
			l.given()
			return nc, nil
		case isAuth(err):
			return nil, fmt.Errorf("NATS at %s: %w: it refuses the credentials (%w): check user and password", l.where, ErrUnreachable, err)
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("NATS at %s: %w: %w", l.where, ErrUnreachable, err)
		case <-time.After(min(cfg.RetryWait, 200*time.Millisecond)):
		}
	}
}

func isAuth(err error) bool {
	return errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired) || errors.Is(err, nats.ErrAuthRevoked) ||
		errors.Is(err, nats.ErrAccountAuthExpired) || strings.Contains(strings.ToLower(err.Error()), "authorization violation")
}

// Redact returns urls, which may be several separated by commas, without their secrets.
func Redact(urls string) string {
	parts := strings.Split(urls, ",")
	for i, p := range parts {
		u, err := parse(p)
		switch {
		case err != nil:
			parts[i] = "(not a URL)"
		case u.User == nil:
			parts[i] = u.String()
		default:
			who := ""
			if _, has := u.User.Password(); has {
				who = u.User.Username() + ":"
			}
			u.User = nil
			parts[i] = u.Scheme + "://" + who + "***@" + strings.TrimPrefix(u.String(), u.Scheme+"://")
		}
	}
	return strings.Join(parts, ",")
}

func parse(s string) (*url.URL, error) {
	s = strings.TrimSpace(s)
	if !strings.Contains(s, "://") {
		s = "nats://" + s
	}
	u, err := url.Parse(s)
	if err == nil && u.Host == "" {
		err = errors.New("no host")
	}
	return u, err
}

// link tells of one connection: loud once, then summarised.
type link struct {
	cfg   Config
	where string
	log   *slog.Logger
	m     *Metrics

	mu       sync.Mutex      // all below
	inUse    bool            // somebody has the connection, and is not to wait for it
	shun     bool            // no server is dialled just now
	wanted   map[string]bool // servers that the client has asked for since the last look, true for one that it was not given
	heard    map[string]bool // servers that had a word for us at the last look, if only a refusal, and were not dialled since
	isUp     bool
	since    time.Time // of the outage; zero while there is none
	told     time.Time
	attempts int
	dialErr  error                // of the last attempt to reach a server, nil if one was reached
	said     map[string]time.Time // asynchronous errors already told, bounded
}

func newLink(cfg Config, log *slog.Logger, m *Metrics) (*link, error) {
	for _, p := range strings.Split(cfg.URL, ",") {
		if _, err := parse(p); err != nil { // err quotes the URL, and with it a password
			return nil, fmt.Errorf("NATS URL %s: want something like %s", Redact(cfg.URL), DefaultURL)
		}
	}
	if m == nil {
		m = NewMetrics(prometheus.NewRegistry())
	}
	return &link{cfg: cfg, where: Redact(cfg.URL), log: log, m: m, wanted: map[string]bool{}, heard: map[string]bool{}, said: map[string]time.Time{}}, nil
}

// Dial reaches a server for the client, and keeps the reason when there is none: the client says only that it has no server, or
// no buffer. The client holds its lock from here until the server has let it in, and whoever publishes, or only asks it how it is, waits
// for that: once it is in use it gets no further than to servers that were heard just now.
func (l *link) Dial(network, address string) (net.Conn, error) {
	conn, err := net.Conn(nil), errSilent
	if l.heardOf(address) {
		conn, err = net.DialTimeout(network, address, l.cfg.Timeout)
	}
	l.mu.Lock()
	l.dialErr = err
	l.mu.Unlock()
	return conn, err
}

// heardOf says whether a server is to be dialled, once for each time that it was heard.
func (l *link) heardOf(address string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inUse && !l.heard[address] || l.shun {
		l.wanted[address] = true
		return false
	}
	l.heard[address], l.wanted[address] = false, false
	return true
}

// look listens to the servers that the client has tried since the last time, while nobody waits for it, and returns after how long it is
// to try them again: at once when one is heard that it could not try. The client calls it before each round.
func (l *link) look(int) time.Duration {
	l.mu.Lock()
	all := l.wanted
	l.wanted, l.heard = map[string]bool{}, map[string]bool{}
	l.mu.Unlock()
	// Over a web socket it is us who say the first word.
	silent := func(one string) bool {
		return !strings.HasPrefix(strings.TrimSpace(l.cfg.URL), "ws") && mute(one, l.cfg.Timeout)
	}
	var news atomic.Bool
	var looking sync.WaitGroup
	for one, unheard := range all {
		looking.Go(func() {
			if silent(one) {
				return
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			l.heard[one] = true
			if unheard {
				news.Store(true)
			}
		})
	}
	looking.Wait()
	if news.Load() {
		return 0
	}
	return l.cfg.RetryWait + rand.N(l.cfg.RetryWait+1)
}

// cause is the reason of an outage. mu is held.
func (l *link) cause(err error) error {
	vague := err == nil || errors.Is(err, nats.ErrNoServers) || errors.Is(err, nats.ErrReconnectBufExceeded)
	if vague && l.dialErr != nil {
		return l.dialErr
	}
	return err
}

func (l *link) options() []nats.Option {
	opts := []nats.Option{
		nats.Name(l.cfg.Name),
		nats.Timeout(l.cfg.Timeout),
		nats.SetCustomDialer(l),
		nats.MaxReconnects(-1),
		// A server that forgets a user and learns it again must not cost us the connection for ever.
		nats.IgnoreAuthErrorAbort(),
		nats.CustomReconnectDelay(l.look),
		// A server that takes nothing off our hands is waited for under the client's lock as well.
		nats.FlusherTimeout(time.Second),
		// A buffer would send old heartbeats and shares late, and make publishers wait for a time-out.
		nats.ReconnectBufSize(-1),
		// A peer that is gone without a word is noticed in six seconds; until then a gateway cannot report and hears nothing.
		nats.PingInterval(2 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.ConnectHandler(func(nc *nats.Conn) { l.up() }),
		nats.ReconnectHandler(func(nc *nats.Conn) { l.up() }),
		nats.DisconnectErrHandler(func(nc *nats.Conn, err error) {
			if !nc.IsClosed() {
				l.down(err)
			}
		}),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { l.retry(err) }),
		nats.ClosedHandler(func(*nats.Conn) { l.closed() }),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) { l.asyncError(sub, err) }),
	}
	if l.cfg.InboxPrefix != "" {
		opts = append(opts, nats.CustomInboxPrefix(l.cfg.InboxPrefix))
	}
	return opts
}

// given is called once the connection is somebody's.
func (l *link) given() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inUse, l.shun = true, false
}

func (l *link) up() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.since.IsZero() {
		l.log.Info("NATS is back", "url", l.where, "name", l.cfg.Name, "after", time.Since(l.since).Round(time.Millisecond), "attempts", l.attempts)
		l.m.Degraded.Dec()
	}
	if !l.isUp {
		l.m.Connected.Inc()
	}
	l.isUp, l.since, l.attempts = true, time.Time{}, 0
	clear(l.heard) // by the time that it is of use again, that was long ago
}

func (l *link) down(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isUp {
		l.m.Connected.Dec()
		l.isUp = false
	}
	if !l.since.IsZero() {
		return
	}
	l.m.Errors.WithLabelValues("disconnect").Inc()
	l.m.Degraded.Inc()
	l.since = time.Now()
	l.told = l.since
	l.log.Warn("NATS is away, trying again until it is back", "url", l.where, "name", l.cfg.Name, "err", l.cause(err))
}

func (l *link) retry(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.attempts++
	if !l.since.IsZero() && time.Since(l.told) >= l.cfg.LogEvery {
		l.told = time.Now()
		l.log.Warn("NATS is still away", "url", l.where, "name", l.cfg.Name, "for", time.Since(l.since).Round(time.Second), "attempts", l.attempts, "err", l.cause(err))
	}
}

func (l *link) closed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isUp {
		l.m.Connected.Dec()
	}
	if !l.since.IsZero() {
		l.m.Degraded.Dec()
	}
	l.isUp, l.since = false, time.Time{}
}

// asyncError is the only place where a forbidden publish or subscription shows (FACTS T7): JetStream callers just see
// a time-out.
func (l *link) asyncError(sub *nats.Subscription, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	subject := ""
	if sub != nil {
		subject = sub.Subject
	}
	reason, say := "other", func() {
		l.log.Warn("NATS connection", "url", l.where, "name", l.cfg.Name, "subject", subject, "err", err)
	}
	switch {
	case errors.Is(err, nats.ErrPermissionViolation):
		reason, say = "permission", func() {
			l.log.Error("configuration: NATS does not let this user do what weir needs", "url", l.where, "name", l.cfg.Name, "err", err)
		}
	case isAuth(err):
		reason, say = "auth", func() {
			l.log.Error("configuration: NATS refuses the credentials, trying again until it takes them", "url", l.where, "name", l.cfg.Name, "err", err)
		}
	case errors.Is(err, nats.ErrSlowConsumer):
		reason, say = "slow_consumer", func() {
			l.log.Warn("NATS messages dropped: this process reads them too slowly", "url", l.where, "subject", subject)
		}
	}
	l.m.Errors.WithLabelValues(reason).Inc()
	text := err.Error() + subject
	if at, ok := l.said[text]; (ok && time.Since(at) < l.cfg.LogEvery) || (!ok && len(l.said) >= 100) {
		return
	}
	l.said[text] = time.Now()
	say()
}

// Ask asks the server of nc for a sign of life, until ctx is done. A connection that is down has said so already, and is not asked.
func Ask(ctx context.Context, nc *nats.Conn) error {
	if !nc.IsConnected() {
		return nil
	}
	if err := nc.FlushWithContext(ctx); err != nil && nc.IsConnected() {
		return fmt.Errorf("ask NATS for a sign of life: %w", err)
	}
	return nil
}
