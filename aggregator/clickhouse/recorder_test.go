package clickhouse

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/schemas"
)

// samples is a SampleStore in memory that can be broken.
type samples struct {
	mu               sync.Mutex
	err              error
	inserts          int
	heartbeats, rows int
}

func (s *samples) Gateways(_ context.Context, g []GatewaySample) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inserts++
	if s.err == nil {
		s.heartbeats += len(g)
	}
	return s.err
}

func (s *samples) ThrottleUpdates(_ context.Context, u []ThrottleSample) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inserts++
	for i := range u {
		if s.err == nil {
			s.rows += len(u[i].Shares)
		}
	}
	return s.err
}

func (s *samples) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

func (s *samples) seen() (inserts, heartbeats, rows int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inserts, s.heartbeats, s.rows
}

func TestRecorderInsertsOncePerSecondAndDropsCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var said strings.Builder
		st, m := &samples{}, NewMetrics(prometheus.NewRegistry())
		r := NewRecorder(RecorderConfig{MaxSamples: 10}, st, m, slog.New(slog.NewTextHandler(&said, nil)))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { r.Run(ctx); close(done) }()

		record := func(n int) {
			for range n {
				r.Gateway(GatewaySample{Time: time.Now()})
				r.Throttle(ThrottleSample{Time: time.Now(), ThrottleUpdate: &schemas.ThrottleUpdate{Shares: make([]schemas.Share, 2)}})
				r.Throttle(ThrottleSample{Time: time.Now(), ThrottleUpdate: &schemas.ThrottleUpdate{}})
			}
		}
		want := func(inserts, heartbeats, rows int, dropped float64) {
			t.Helper()
			i, h, n := st.seen()
			if d := testutil.ToFloat64(m.Dropped); i != inserts || h != heartbeats || n != rows || d != dropped {
				t.Errorf("%d inserts of %d heartbeats and %d shares, %v dropped, want %d, %d, %d, %v", i, h, n, d, inserts, heartbeats, rows, dropped)
			}
		}
		record(3)
		synctest.Wait()
		want(0, 0, 0, 0)
		time.Sleep(1100 * time.Millisecond)
		synctest.Wait()
		want(2, 3, 6, 0)
		time.Sleep(10 * time.Second) // nothing to write
		synctest.Wait()
		want(2, 3, 6, 0)

		record(12) // 10 heartbeats and 5 updates fit
		want(2, 3, 6, 2+14)
		time.Sleep(time.Second)
		synctest.Wait()
		want(4, 13, 16, 16)

		st.fail(errors.New("away"))
		for range 3 {
			record(1)
			time.Sleep(time.Second)
		}
		synctest.Wait()
		want(10, 13, 16, 16+9)
		st.fail(nil)
		record(1)
		cancel() // writes what is left
		<-done
		want(12, 14, 18, 25)
		if n := strings.Count(said.String(), "not stored"); n != 1 || !strings.Contains(said.String(), "stored again") {
			t.Errorf("said %d times that rows are not stored, want once, then that they are again: %s", n, said.String())
		}
	})
}

func TestSamplesAreRows(t *testing.T) {
	s := fresh(t)
	h := schemas.Heartbeat{Gateway: "gw-1", Boot: "b", SentAt: noon.Add(-3 * time.Second), PolicyVersion: 4, Mode: "stale",
		ClockOffset: 3 * time.Second, ClockError: time.Millisecond, ClockKnown: true, PendingReports: 2, Version: "1.2.3", Sealed: 41}
	unknown := h
	unknown.ClockKnown, unknown.SentAt = false, time.Time{}
	u := &schemas.ThrottleUpdate{Gateways: 3, TTL: 5 * time.Second, Snapshot: true, Shares: []schemas.Share{
		{Rule: "contract", Key: "acme", Version: 9, RateNanos: 5e9, Burst: 10, LimitRateNanos: 15e9, LimitBurst: 30, Reason: "demand", Level: -2},
		{Rule: "guard", Key: ""}}}
	// Two equal blocks are two: nothing is taken for a repetition.
	for range 2 {
		if err := s.Gateways(t.Context(), []GatewaySample{{noon, h}, {noon, unknown}}); err != nil {
			t.Fatal(err)
		}
		if err := s.ThrottleUpdates(t.Context(), []ThrottleSample{{noon, "gw-1", u}}); err != nil {
			t.Fatal(err)
		}
	}
	for sql, want := range map[string]uint64{
		"(SELECT count() FROM gateways)": 4,
		"(SELECT countIf(ts = '2026-11-15 12:00:00' AND gateway = 'gw-1' AND sent = '2026-11-15 11:59:57' AND mode = 'stale' AND clock_offset_ns = 3000000000 AND pending_reports = 2 AND sealed = 41) FROM gateways)": 2,
		"(SELECT countIf(clock_offset_ns IS NULL) FROM gateways)": 2,
		"(SELECT count() FROM throttle_updates)":                  4,
		"(SELECT countIf(rule = 'contract' AND key = 'acme' AND version = 9 AND rate_nanos = 5000000000 AND burst = 10 AND level = -2 AND gateways = 3 AND ttl_ms = 5000 AND snapshot) FROM throttle_updates)": 2,
	} {
		if got := number(t, s, sql); got != want {
			t.Errorf("%s = %d, want %d", sql, got, want)
		}
	}
	if err := s.ThrottleUpdates(t.Context(), nil); err != nil {
		t.Error(err)
	}
}
