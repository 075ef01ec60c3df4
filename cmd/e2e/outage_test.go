package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weirhq/weir/cmd/internal/rig"
	"github.com/weirhq/weir/internal/faultproxy"
	"github.com/weirhq/weir/schemas"
)

// outages is the matrix, by part.
var outages = []struct {
	part string
	// degraded are the series that show the outage, and on which process; none where nobody but the part itself could.
	on       string
	degraded []string
	alert    string                      // that on-call gets, "" where there is none
	slow     map[string][2]time.Duration // replies of these links are late
	disk     bool                        // it writes to one
}{
	{part: rig.NATS, on: rig.GatewayName(1), degraded: []string{"nats", "ingest", "centre"}, disk: true,
		slow: map[string][2]time.Duration{rig.Link(rig.GatewayName(1), rig.NATS): late(300), rig.Link(rig.GatewayName(2), rig.NATS): late(300), rig.Link(rig.Aggregator, rig.NATS): late(100)}},
	{part: rig.Redis, on: rig.Aggregator, degraded: []string{"redis"}, disk: true,
		slow: map[string][2]time.Duration{rig.Link(rig.Aggregator, rig.Redis): late(200)}},
	{part: rig.ClickHouse, on: rig.Aggregator, degraded: []string{"clickhouse", "consumer"}, disk: true,
		slow: map[string][2]time.Duration{rig.Link(rig.Aggregator, rig.ClickHouse): late(300)}},
	{part: rig.Aggregator, on: rig.GatewayName(1), degraded: []string{"centre"}, alert: "degraded"},
	{part: rig.Alerter},
}

func late(ms int) [2]time.Duration {
	return [2]time.Duration{faultproxy.Down: time.Duration(ms) * time.Millisecond}
}

// TestOutages is the outage matrix of ARCHITECTURE.md: each part away in each way, under load. Whatever is away, gateways answer
// every request as fast as before, refuse what is over its limit, show what is wrong, and what they counted is whole once the
// part is back. How fast is logged, and judged only where a thing waits for something that it must not wait for.
func TestOutages(t *testing.T) {
	for _, o := range outages {
		t.Run(o.part, func(t *testing.T) {
			oncall := newOncall(t)
			stores := map[string]string{}
			var fill, empty func()
			if o.disk {
				stores[o.part], fill, empty = disk(t)
			}
			dir := t.TempDir()
			r, err := rig.New(rig.Config{Dir: dir, Binary: binary, Gateways: 2, Down: o.part, Webhook: oncall.URL, Secret: secret, Stores: stores})
			t.Cleanup(func() {
				r.Close()
				for _, n := range r.Notes() {
					t.Error(n)
				}
				if t.Failed() {
					logs(t, dir)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			part, j := r.Parts[o.part], rig.NewJournal()
			do := func(err error) {
				t.Helper()
				if err != nil {
					t.Fatal(err)
				}
			}
			m := &matrix{t: t, r: r, j: j, part: o.part}

			shown := func() bool { return m.shown(o.on, o.degraded) }
			if o.degraded == nil {
				shown = nil
			}
			m.cell("down at start", nil, shown, func() { do(part.Restart()) })
			m.cell("all up", nil, nil, nil)
			var died time.Time
			m.cell("dies", func() { died = time.Now(); do(part.Kill()) }, shown, func() {
				if o.alert != "" {
					eventually(t, "on-call hears of "+o.alert, func() bool {
						_, _, ok := oncall.find(schemas.AlertFiring, o.alert, "")
						return ok
					})
					_, at, _ := oncall.find(schemas.AlertFiring, o.alert, "")
					t.Logf("on-call heard of %s %s after %s died", o.alert, at.Sub(died).Round(100*time.Millisecond), o.part)
				}
				do(part.Restart())
			})
			m.cell("hangs", func() { do(part.Pause()) }, shown, func() { do(part.Resume()) })
			if o.slow != nil {
				m.cell("slow", func() {
					for l, delay := range o.slow {
						r.Links[l].Set(faultproxy.Faults{Delay: delay})
					}
				}, nil, func() {
					for l := range o.slow {
						r.Links[l].Set(faultproxy.Faults{})
					}
				})
			} else { // a process is slow when it seldom runs
				stop := make(chan struct{})
				ended := make(chan error, 1)
				m.cell("slow", func() {
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
				}, nil, func() { close(stop); do(<-ended) })
			}
			if fill != nil {
				m.cell("full disk", fill, shown, func() {
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

// matrix is one row of the matrix: the cells of one part.
type matrix struct {
	t    *testing.T
	r    *rig.Rig
	j    *rig.Journal
	part string
	rows []row
}

// row is what was measured in a cell.
type row struct {
	name          string
	p50, p99      time.Duration
	answers       int
	shown, whole  time.Duration // until the mode showed, and until the counts were whole; negative where it was not looked for
	neverAnswered uint64
}

const (
	cellRate = 300                     // requests per second
	cellTime = 1500 * time.Millisecond // at least
)

// cell is one condition under load: it begins, is seen, and ends; then everything that was answered must be stored once.
func (m *matrix) cell(name string, begin func(), seen func() bool, end func()) {
	ok := m.t.Run(name, func(t *testing.T) {
		_, unanswered := m.j.Totals()
		refused := m.j.Refused()
		row := row{name: name, shown: -1}
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		if begin != nil {
			begin()
		}
		sent := make(chan struct{})
		began := time.Now()
		go func() {
			defer close(sent)
			rig.Send(ctx, m.j, uint64(len(m.rows)), cellRate, m.r.Gateways)
		}()
		if seen != nil {
			eventually(t, "the outage shows", seen)
			row.shown = time.Since(began)
		}
		time.Sleep(time.Until(began.Add(cellTime)))
		stop()
		<-sent
		times := m.j.TakeTimes()
		slices.Sort(times)
		if row.answers = len(times); row.answers == 0 {
			t.Fatal("no request was answered")
		}
		row.p50, row.p99 = times[row.answers/2], times[row.answers*99/100]
		_, after := m.j.Totals()
		if row.neverAnswered = after - unanswered; row.neverAnswered > 0 {
			t.Errorf("%d requests were never answered", row.neverAnswered)
		}
		if m.j.Refused() == refused {
			t.Error("nothing was refused")
		}
		if end != nil {
			end()
		}
		began = time.Now()
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
		row.whole = time.Since(began)
		if seen != nil {
			eventually(t, "nothing shows any more", func() bool { return !seen() })
		}
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

// report logs what was measured, and fails when a decision has waited for the part that was away.
func (m *matrix) report() {
	var base row
	for _, r := range m.rows {
		if r.name == "all up" {
			base = r
		}
	}
	for _, r := range m.rows {
		m.t.Logf("%-10s %-14s %5d answers, p50 %8s, p99 %8s, shown after %7s, whole after %7s", m.part, r.name, r.answers,
			r.p50.Round(10*time.Microsecond), r.p99.Round(10*time.Microsecond), r.shown.Round(time.Millisecond), r.whole.Round(time.Millisecond))
		if r.p50 > 10*base.p50+50*time.Millisecond {
			m.t.Errorf("%s %s: half of all requests took %s or longer, and %s with all up", m.part, r.name, r.p50, base.p50)
		}
	}
}

// disk is a file system of its own, which fill leaves without a free byte until empty. To mount one takes root: without, there
// is no fill.
func disk(t *testing.T) (dir string, fill, empty func()) {
	t.Helper()
	dir = t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=16g"); err != nil {
		t.Logf("no cell with a full disk: %v", err)
		return dir, nil, nil
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	resize := func(size string) error { return syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT, "size="+size) }
	fill = func() {
		eventually(t, "the disk is full", func() bool {
			var s syscall.Statfs_t
			if err := syscall.Statfs(dir, &s); err != nil {
				return false
			}
			return resize(fmt.Sprint((s.Blocks-s.Bfree)*uint64(s.Bsize))) == nil // no when it has grown meanwhile
		})
	}
	empty = func() {
		if err := resize("16g"); err != nil {
			t.Fatal(err)
		}
	}
	return dir, fill, empty
}

// logs shows the logs of a rig.
func logs(t *testing.T, dir string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil {
		t.Error(err)
	}
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil {
			t.Logf("%s:\n%s", filepath.Base(f), b)
		}
	}
}
