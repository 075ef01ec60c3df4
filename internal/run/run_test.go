package run

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestStopsInReverseOrderAndWaitsForEach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Stack
		var order []string // each part is waited for before the next is told, so no lock is needed
		for _, name := range []string{"nats", "reporter", "listener"} {
			s.Go(name, func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(time.Second)
				order = append(order, name)
				return nil
			})
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := s.Wait(ctx, 10*time.Second); err != nil {
			t.Fatal(err)
		}
		if want := []string{"listener", "reporter", "nats"}; !slices.Equal(order, want) {
			t.Errorf("stopped %v, want %v", order, want)
		}
	})
}

func TestAPartKnowsWhatIsLeftOfTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Stack
		var took time.Duration
		s.Defer("reports", func() error { took = s.Stopping(); return nil })
		s.Defer("requests", func() error { time.Sleep(5 * time.Second); return nil })
		time.Sleep(time.Hour)
		if d := s.Stopping(); d != 0 {
			t.Errorf("Stopping = %s before Stop, want 0", d)
		}
		if err := s.Stop(10 * time.Second); err != nil || took != 5*time.Second {
			t.Errorf("Stop = %v, and Stopping was %s after requests, want 5s", err, took)
		}
	})
}

func TestAFailingPartStopsTheRest(t *testing.T) {
	var s Stack
	closed := false
	s.Defer("connection", func() error { closed = true; return nil })
	s.Go("broken", func(context.Context) error { return errors.New("address in use") })
	err := s.Wait(t.Context(), time.Second)
	if err == nil || !strings.Contains(err.Error(), "address in use") || !closed {
		t.Errorf("Wait = %v with connection closed = %v, want the part's error and a closed connection", err, closed)
	}
}

func TestAStuckPartIsNamedAndNotWaitedFor(t *testing.T) {
	var s Stack
	never := make(chan struct{})
	defer close(never)
	told := make(chan struct{})
	s.Go("first", func(ctx context.Context) error { <-ctx.Done(); close(told); return nil })
	s.Go("stuck", func(context.Context) error { <-never; return nil })
	err := s.Stop(10 * time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "stuck did not stop within 10ms") {
		t.Errorf("Stop = %v, want the name of what stuck", err)
	}
	<-told // even so the others were told
	if again := s.Stop(time.Second); !errors.Is(again, err) {
		t.Errorf("second Stop = %v, want the same error", again)
	}
}
