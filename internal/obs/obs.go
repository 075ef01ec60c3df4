// Package obs is what an operator sees of a process: its log, its metrics, and the listener that serves them.
package obs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"runtime"
	"runtime/debug"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// version is set by the linker; a build without it reads the build information.
var version string

// Version names this build.
func Version() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "devel"
}

// Logger returns a logger of one JSON object per line, with durations as text such as 1m30s. level is debug, info, warn or error.
func Logger(w io.Writer, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log level %q, want debug, info, warn or error", level)
	}
	return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: l, ReplaceAttr: legible})), nil
}

// legible writes a duration as people do: the JSON handler would write nanoseconds.
func legible(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().String())
	}
	return a
}

// Shared holds the metrics that several packages write, each its own label value.
type Shared struct {
	units    *prometheus.CounterVec
	degraded *prometheus.GaugeVec
	alone    *prometheus.Registry // of degraded, to be read
	policy   prometheus.Gauge
	reloadOK prometheus.Gauge
}

// Registry returns a registry with the process's own metrics and the shared ones.
func Registry() (*prometheus.Registry, *Shared) {
	reg := prometheus.NewRegistry()
	s := &Shared{
		units: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_usage_units_total",
			Help: "Requests that reached a stage of the pipeline: admitted and refused at the gateway count as admitted; differences between stages are in flight."}, []string{"stage"}),
		degraded: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "weir_degraded",
			Help: "1 while a part does without something it needs; above 1 when several parts of this process do."}, []string{"part"}),
		policy: prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_policy_version",
			Help: "Version of the policy in force, a hash of its content: equal on gateways that agree."}),
		reloadOK: prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_policy_last_reload_ok",
			Help: "0 when the policy on disk could not be taken and the last good one is in force."}),
	}
	info := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "weir_build_info", Help: "Always 1.",
		ConstLabels: prometheus.Labels{"version": Version(), "go": runtime.Version()}}, func() float64 { return 1 })
	s.alone = prometheus.NewRegistry()
	s.alone.MustRegister(s.degraded)
	reg.MustRegister(s.units, s.degraded, s.policy, s.reloadOK, info,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return reg, s
}

// Units is the counter of one stage: admitted, spooled, acked, reconciled or stored.
func (s *Shared) Units(stage string) prometheus.Counter { return s.units.WithLabelValues(stage) }

// Degraded is the gauge of one part; it is raised on entering degradation and lowered on leaving it.
func (s *Shared) Degraded(part string) prometheus.Gauge { return s.degraded.WithLabelValues(part) }

// Raised are those of parts that are degraded now.
func (s *Shared) Raised(parts ...string) (raised []string) {
	families, err := s.alone.Gather()
	if err != nil {
		panic("obs: weir_degraded cannot be gathered: " + err.Error()) // it is one vector of gauges
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if part := m.GetLabel()[0].GetValue(); m.GetGauge().GetValue() > 0 && slices.Contains(parts, part) {
				raised = append(raised, part)
			}
		}
	}
	return raised
}

// Policy is told which policy is in force, and whether the newest one on disk was taken.
func (s *Shared) Policy(version uint64, ok bool) {
	s.policy.Set(float64(version))
	s.reloadOK.Set(map[bool]float64{false: 0, true: 1}[ok])
}

// Check is one condition of readiness. It must not touch the network.
type Check struct {
	Name   string
	Ready  func() error
	Beside bool // shown, and the process is ready without it
}

// Admin serves /livez, /readyz, /metrics and /debug/pprof.
type Admin struct {
	ln  net.Listener
	srv *http.Server
}

// NewAdmin listens on addr at once, so that an address in use is an error here, and serves when Run is called.
func NewAdmin(addr string, reg *prometheus.Registry, log *slog.Logger, checks ...Check) (*Admin, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen for metrics on %s: %w", addr, err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) { ready(w, checks) })
	mux.Handle("/metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{EnableOpenMetrics: true, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelError)}))
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	return &Admin{ln: ln, srv: &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}}, nil
}

func ready(w http.ResponseWriter, checks []Check) {
	var lines []string
	code := http.StatusOK
	for _, c := range checks {
		switch err := c.Ready(); {
		case err == nil:
			lines = append(lines, c.Name+": ok")
		case c.Beside:
			lines = append(lines, fmt.Sprintf("%s: degraded: %s", c.Name, oneLine(err)))
		default:
			code = http.StatusServiceUnavailable
			lines = append(lines, fmt.Sprintf("%s: %s", c.Name, oneLine(err)))
		}
	}
	sort.Strings(lines)
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	fmt.Fprintln(w, strings.Join(lines, "\n"))
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// Addr is the address that Admin listens on.
func (a *Admin) Addr() string { return a.ln.Addr().String() }

// Run serves until ctx is done.
func (a *Admin) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = a.srv.Close() })
	defer stop()
	if err := a.srv.Serve(a.ln); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}
