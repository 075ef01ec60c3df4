package e2e

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/cmd/internal/rig"
)

// TestSIGTERMWhileServersHang: every part ends within the time that it is given, under load, whichever server hangs meanwhile, and all of
// them; a gateway's exit says that nothing is lost, and in the end nothing is.
func TestSIGTERMWhileServersHang(t *testing.T) {
	r := newRig(t, rig.Config{Gateways: 2})
	j := rig.NewJournal()
	ctx, stop := context.WithCancel(t.Context())
	var load sync.WaitGroup
	defer load.Wait()
	defer stop()
	load.Go(func() { rig.Send(ctx, j, 1, cellRate, r.Gateways) })
	names := []string{rig.GatewayName(1), rig.GatewayName(2)}
	for _, hung := range [][]string{{rig.NATS}, {rig.Redis}, {rig.ClickHouse}, {rig.NATS, rig.Redis, rig.ClickHouse}} {
		what := strings.Join(hung, " and ")
		time.Sleep(cellTime)
		for _, s := range hung {
			if err := r.Parts[s].Pause(); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(cellTime) // until somebody waits for it
		var ends sync.WaitGroup
		for name, w := range r.Weirs {
			if name == rig.GatewayName(2) {
				continue // somebody goes on
			}
			ends.Go(func() {
				began := time.Now()
				code, err := w.Term()
				took := time.Since(began)
				t.Logf("%s without %s: %s, exit code %d", name, what, took.Round(10*time.Millisecond), code)
				if err != nil || took > app.StopTimeout {
					t.Errorf("%s took %s to end on SIGTERM while %s hung (%v), want %s at most", name, took, what, err, app.StopTimeout)
				}
				if name == rig.GatewayName(1) && code != 0 {
					t.Errorf("%s ended with %d while %s hung, want 0", name, code, what)
				}
			})
		}
		ends.Wait()
		for _, s := range hung {
			if err := r.Parts[s].Resume(); err != nil {
				t.Fatal(err)
			}
		}
		for _, w := range r.Weirs {
			if err := w.Restart(); err != nil {
				t.Fatal(err)
			}
		}
		for _, name := range []string{rig.Aggregator, rig.Alerter} {
			if err := r.AwaitReady(name); err != nil {
				t.Fatal(err)
			}
		}
	}
	stop()
	load.Wait()
	if err := r.Drain(names); err != nil {
		t.Fatal(err)
	}
	stored, err := r.Stored()
	if err != nil {
		t.Fatal(err)
	}
	var v rig.Verdict
	v.History(j.Cells, stored)
	requests, unanswered := j.Totals()
	t.Logf("%d requests, %d without an answer, lost %d, doubled %d", requests, unanswered, v.Lost, v.Doubled)
	if v.Lost+v.Doubled > 0 || requests == 0 {
		t.Errorf("lost %d, doubled %d of %d: %q", v.Lost, v.Doubled, requests, v.Lines)
	}
}
