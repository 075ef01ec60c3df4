package pulse

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// A server that hangs shows within a second, one that refuses at once; both go out again a second after they answer.
func TestPulse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		var hangs, refuses, told atomic.Bool
		raised := prometheus.NewGauge(prometheus.GaugeOpts{Name: "raised"})
		p := &Pulse{Server: "x", Raised: raised, Log: slog.New(slog.NewTextHandler(&log, nil)), Ask: func(ctx context.Context) error {
			for hangs.Load() {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case <-time.After(time.Millisecond):
				}
			}
			if told.Load() {
				return ErrTold
			}
			if refuses.Load() {
				return errors.New("refused")
			}
			return nil
		}}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- p.Run(ctx) }()
		want := func(what string, v float64) {
			t.Helper()
			synctest.Wait()
			if got := testutil.ToFloat64(raised); got != v || (p.Away() > 0) != (v > 0) {
				t.Errorf("%s: raised %v, away for %s", what, got, p.Away())
			}
		}
		time.Sleep(3 * time.Second)
		want("well", 0)
		for range 3 { // also when a question is given up and asked anew
			hangs.Store(true)
			time.Sleep(200 * time.Millisecond)
			want("not late yet", 0)
			time.Sleep(600 * time.Millisecond)
			want("late", 1)
			time.Sleep(7 * time.Second)
			want("still late", 1)
			if got := p.Silent(); got < 7800*time.Millisecond || got > 8250*time.Millisecond {
				t.Errorf("silent for %s of a server that has hung for 8 s", got)
			}
			hangs.Store(false)
			time.Sleep(900 * time.Millisecond)
			want("answers, and not for long", 1)
			if got := p.Silent(); got == 0 || got > 250*time.Millisecond {
				t.Errorf("silent for %s of one that answers again", got)
			}
			time.Sleep(time.Second)
			want("well again", 0)
			if got := p.Silent(); got != 0 {
				t.Errorf("silent for %s of one that is well", got)
			}
		}
		refuses.Store(true)
		time.Sleep(300 * time.Millisecond)
		want("refuses", 1)
		for range 5 { // a server that is up every other moment is not well
			refuses.Store(false)
			time.Sleep(600 * time.Millisecond)
			want("flaps", 1)
			refuses.Store(true)
			time.Sleep(600 * time.Millisecond)
		}
		told.Store(true)
		time.Sleep(2 * time.Second)
		want("somebody else's matter", 0)
		told.Store(false)
		hangs.Store(true)
		time.Sleep(time.Second)
		want("hangs when it is back", 1)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		want("stopped", 0)
		if n := bytes.Count(log.Bytes(), []byte("well again")); n != 3 {
			t.Errorf("told %d times that it is well again, want 3: not of a server that hung when nobody asked any more, or that is away", n)
		}
	})
}
