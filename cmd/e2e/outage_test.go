package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/cmd/internal/rig"
	"github.com/weirhq/weir/internal/disktest"
	"github.com/weirhq/weir/internal/faultproxy"
)

// outages is the matrix, by part.
var outages = []struct {
	part string
	// degraded are the series that show the outage, and on which process.
	on       string
	degraded []string
	slow     map[string]int    // replies of these links are late, in ms
	disk     bool              // it writes to one
	alerts   map[string]string // dedup keys by cell, where they are not that of the part; "" where nobody can know
}{
	{part: rig.NATS, on: rig.GatewayName(1), degraded: []string{"nats", "ingest", "centre"}, disk: true, alerts: map[string]string{"very slow": "degraded/part/ingest", "full disk": "degraded/part/ingest"},
		slow: map[string]int{rig.Link(rig.GatewayName(1), rig.NATS): 300, rig.Link(rig.GatewayName(2), rig.NATS): 300, rig.Link(rig.Aggregator, rig.NATS): 100}},
	{part: rig.Redis, on: rig.Aggregator, degraded: []string{"redis"}, disk: true,
		slow: map[string]int{rig.Link(rig.Aggregator, rig.Redis): 200}},
	{part: rig.ClickHouse, on: rig.Aggregator, degraded: []string{"clickhouse"}, disk: true,
		slow: map[string]int{rig.Link(rig.Aggregator, rig.ClickHouse): 300}},
	{part: rig.Aggregator, on: rig.GatewayName(1), degraded: []string{"centre"}, alerts: map[string]string{"down at start": "degraded/" + rig.GatewayName(1)}},
	{part: rig.Alerter, on: rig.Standby, degraded: []string{"alerter"}, alerts: map[string]string{"down at start": ""}}, // the other one never knew of it
}

// Promises of the matrix. A busy machine may take patience times as long before a test fails.
const (
	showsWithin = time.Second
	pagesWithin = 5 * time.Second
	patience    = 3
)

// TestOutages is the outage matrix of ARCHITECTURE.md: each part away in each way, under load. Whatever is away, gateways answer
// every request as fast as before, refuse what is over its limit, show what is wrong, on-call hears of it, and what they counted
// is whole once the part is back. How fast is logged, and judged only where it is out of all proportion.
func TestOutages(t *testing.T) {
	for _, o := range outages {
		t.Run(o.part, func(t *testing.T) {
			oncall := newOncall(t)
			stores := map[string]string{}
			var fill, empty func()
			if o.disk {
				var err error
				if stores[o.part], fill, empty, err = disktest.Try(t); err != nil {
					t.Run("full disk", func(t *testing.T) { t.Skipf("NOT TESTED: %v", err) })
				}
			}
			began := time.Now()
			r := newRig(t, rig.Config{Gateways: 2, Down: o.part, Standby: o.part == rig.Alerter,
				Webhook: oncall.URL, Secret: secret, Hold: 500 * time.Millisecond, Stores: stores})
			part, j := r.Parts[o.part], rig.NewJournal()
			do := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			m := &matrix{t: t, r: r, j: j, part: o.part, oncall: oncall}
			// cell is one that shows and that on-call hears of.
			cell := func(name string, begin, end func()) {
				alert, ok := o.alerts[name]
				if !ok {
					alert = "degraded/part/" + o.part
				}
				seen := func() bool { return m.shown(o.on, o.degraded) }
				if alert == "" {
					seen = nil
				}
				m.cell(name, began, begin, seen, alert, end)
				began = time.Time{}
			}
			quiet := func(name string, begin, end func()) { m.cell(name, time.Time{}, begin, nil, "", end) }

			cell("down at start", nil, func() { do(part.Restart()) })
			quiet("all up", nil, nil)
			if w := r.Weirs[o.part]; w != nil { // nobody is woken by what was asked for
				quiet("is shut down", func() {
					_, err := w.Term()
					do(err)
					time.Sleep(pagesWithin)
					if keys := oncall.open(alerting.Degraded); len(keys) > 0 {
						t.Errorf("on-call heard of %q after a clean stop", keys)
					}
				}, func() { do(w.Restart()) })
			}
			cell("dies", func() { do(part.Kill()) }, func() { do(part.Restart()) })
			cell("hangs", func() { do(part.Pause()) }, func() { do(part.Resume()) })
			if o.slow != nil {
				late := func(times int) func() {
					return func() {
						for l, ms := range o.slow {
							r.Links[l].Set(faultproxy.Faults{Delay: [2]time.Duration{faultproxy.Down: time.Duration(ms*times) * time.Millisecond}})
						}
					}
				}
				quiet("slow", late(1), late(0))
				cell("very slow", late(5), late(0))
			} else { // a process is slow when it seldom runs
				stop := make(chan struct{})
				ended := make(chan error, 1)
				quiet("slow", func() {
					go func() {
						for {
							err := part.Pause()
							time.Sleep(200 * time.Millisecond)
							if err = errors.Join(err, part.Resume()); err != nil {
								ended <- err
								return
							}
							select {
							case <-stop:
								ended <- nil
								return
							case <-time.After(50 * time.Millisecond):
							}
						}
					}()
				}, func() { close(stop); do(<-ended) })
			}
			if fill != nil {
				cell("full disk", fill, func() {
					empty()
					if o.part == rig.NATS { // a stream that once could not write is done until its server starts again
						do(errors.Join(part.Kill(), part.Restart()))
					}
				})
			}
			m.report()
		})
	}
}

// A gateway whose disk is full answers every request, tells on-call, and all that it counted is stored, from memory: while the disk is
// full, and also when NATS was away meanwhile.
func TestAGatewayWhoseDiskIsFull(t *testing.T) {
	gateway := rig.GatewayName(1)
	dir, fill, empty := disktest.New(t)
	oncall := newOncall(t)
	r := newRig(t, rig.Config{Gateways: 2, Webhook: oncall.URL, Secret: secret, Hold: 500 * time.Millisecond, Stores: map[string]string{gateway: dir}})
	m := &matrix{t: t, r: r, j: rig.NewJournal(), oncall: oncall, part: gateway}
	do := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	shows := func(part string) func() bool {
		return func() bool { return m.shown(gateway, []string{part}) }
	}
	nats := r.Parts[rig.NATS]
	m.cell("all up", time.Time{}, nil, nil, "", nil)
	m.cell("full disk", time.Time{}, fill, shows("spool"), "degraded/part/spool", empty)
	m.cell("NATS dies", time.Time{}, func() {
		fill()
		ctx, stop := context.WithCancel(t.Context())
		go func() {
			defer stop()
			eventually(t, "the disk is full", shows("spool"))
		}()
		rig.Send(ctx, m.j, 1000, cellRate, r.Gateways)
		do(nats.Kill())
	}, shows("ingest"), "degraded/part/nats", func() {
		do(nats.Restart())
		units := func(stage string) float64 {
			n, err := r.Metric(gateway, fmt.Sprintf("weir_usage_units_total{stage=%q}", stage))
			do(err)
			return n
		}
		eventually(t, "all is in the stream while the disk is full", func() bool { n := units("acked"); return n > 0 && n == units("admitted") })
		if !shows("spool")() {
			t.Error("the disk was not full")
		}
		empty()
	})
	m.report()
}

// A NATS that comes back without its store, after the aggregator has lost its leases, is made ready anew by it, and what gateways counted
// is whole.
func TestNATSComesBackEmpty(t *testing.T) {
	store := t.TempDir()
	r := newRig(t, rig.Config{Gateways: 2, Stores: map[string]string{rig.NATS: store}})
	m := &matrix{t: t, r: r, j: rig.NewJournal(), oncall: newOncall(t), part: rig.NATS}
	do := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	m.cell("all up", time.Time{}, nil, nil, "", nil)
	m.cell("comes back empty", time.Time{}, func() { do(r.Parts[rig.NATS].Kill()) }, func() bool { return m.shown(rig.Aggregator, []string{"consumer"}) }, "", func() {
		eventually(t, "the leases are lost", func() bool {
			log, err := os.ReadFile(filepath.Join(r.Dir(), rig.Aggregator+".log"))
			do(err)
			return bytes.Count(log, []byte("lease lost")) == 2
		})
		files, err := filepath.Glob(filepath.Join(store, "*"))
		do(err)
		for _, f := range files {
			do(os.RemoveAll(f))
		}
		do(r.Parts[rig.NATS].Restart())
	})
}

// matrix is one row of the matrix: the cells of one part.
type matrix struct {
	t      *testing.T
	r      *rig.Rig
	j      *rig.Journal
	oncall *oncall
	part   string
	rows   []row
}

// row is what was measured in a cell.
type row struct {
	name                string
	p50, p99            time.Duration
	answers             int
	shown, paged, whole time.Duration // until the mode showed, on-call heard of it, and the counts were whole; negative where it was not looked for
}

const (
	cellRate = 300                     // requests per second
	cellTime = 1500 * time.Millisecond // at least
)

// cell is one condition under load: it begins, at began if that is earlier, is seen, on-call hears of it, and it ends; then
// everything that was answered must be stored once.
func (m *matrix) cell(name string, began time.Time, begin func(), seen func() bool, alert string, end func()) {
	ok := m.t.Run(name, func(t *testing.T) {
		_, unanswered := m.j.Totals()
		refused := m.j.Refused()
		row := row{name: name, shown: -1, paged: -1}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		if begin != nil && seen != nil {
			eventually(t, "nothing of before shows", func() bool { return !seen() })
		}
		starts := time.Now()
		if began.IsZero() {
			began = starts
		}
		if begin != nil {
			begin()
			starts = time.Now()
		}
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			rig.Send(ctx, m.j, uint64(len(m.rows)), cellRate, m.r.Gateways)
		}()
		if seen != nil {
			eventually(t, "the outage shows", seen)
			row.shown = time.Since(starts)
		}
		if alert != "" {
			var at time.Time
			eventually(t, "on-call hears of "+alert, func() (ok bool) { at, ok = m.oncall.since(alert, began); return ok })
			row.paged = max(at.Sub(starts), 0)
		}
		time.Sleep(time.Until(starts.Add(cellTime)))
		stop()
		<-sent
		times := m.j.TakeTimes()
		slices.Sort(times)
		if row.answers = len(times); row.answers == 0 {
			t.Fatal("no request was answered")
		}
		row.p50, row.p99 = times[row.answers/2], times[row.answers*99/100]
		if _, after := m.j.Totals(); after > unanswered {
			t.Errorf("%d requests were never answered", after-unanswered)
		}
		if m.j.Refused() == refused {
			t.Error("nothing was refused")
		}
		if end != nil {
			end()
		}
		ended := time.Now()
		var v rig.Verdict
		defer func() {
			if t.Failed() {
				t.Logf("%s", strings.Join(v.Lines, "\n"))
			}
		}()
		var stored map[rig.Cell]rig.Outcomes
		eventually(t, "what was answered is stored once", func() bool {
			var err error
			stored, err = m.r.Stored()
			v = rig.Verdict{}
			if err != nil {
				return false
			}
			v.History(m.j.Cells, stored)
			return v.Lost == 0 && v.Doubled == 0
		})
		eventually(t, "and counted in Redis", func() bool {
			accounts, err := m.r.Accounts()
			v = rig.Verdict{}
			if err != nil {
				return false
			}
			totals, err := m.r.Totals()
			if err != nil {
				return false
			}
			v.Redis(m.j.Cells, accounts, totals, nil)
			return v.Lost == 0 && v.Doubled == 0
		})
		row.whole = time.Since(ended)
		if seen != nil {
			eventually(t, "nothing shows any more", func() bool { return !seen() })
		}
		eventually(t, "on-call hears that it is over", func() bool { return len(m.oncall.open(alerting.Degraded)) == 0 })
		m.rows = append(m.rows, row)
	})
	if !ok {
		m.t.FailNow() // what follows would only say the same
	}
}

// shown tells whether a process shows one of these parts as degraded.
func (m *matrix) shown(on string, parts []string) bool {
	for _, p := range parts {
		if v, err := m.r.Metric(on, fmt.Sprintf("weir_degraded{part=%q}", p)); err == nil && v > 0 {
			return true
		}
	}
	return false
}

// report logs what was measured, and fails when a decision has waited for the part that was away, or when what was promised took
// much longer.
func (m *matrix) report() {
	var base row
	for _, r := range m.rows {
		if r.name == "all up" {
			base = r
		}
	}
	took := func(d time.Duration) string {
		if d < 0 {
			return "-"
		}
		return d.Round(10 * time.Millisecond).String()
	}
	for _, r := range m.rows {
		m.t.Logf("%-10s %-14s %5d answers, p50 %8s, p99 %8s, shown after %6s, on-call after %6s, whole after %6s", m.part, r.name, r.answers,
			r.p50.Round(10*time.Microsecond), r.p99.Round(10*time.Microsecond), took(r.shown), took(r.paged), took(r.whole))
		if r.p50 > 10*base.p50+50*time.Millisecond {
			m.t.Errorf("%s %s: half of all requests took %s or longer, and %s with all up", m.part, r.name, r.p50, base.p50)
		}
		if r.shown > patience*showsWithin || r.paged > patience*pagesWithin {
			m.t.Errorf("%s %s: shown after %s, want %s; on-call heard after %s, want %s", m.part, r.name, took(r.shown), showsWithin, took(r.paged), pagesWithin)
		}
	}
}
