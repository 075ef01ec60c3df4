package natsx_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/natsx"
)

func leaseKV(t *testing.T) (jetstream.KeyValue, string) {
	t.Helper()
	url := embeddedtest.NATS(t).URL()
	return kvOf(t, url), url
}

func jsOf(t *testing.T, url string) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

var leases = jetstream.KeyValueConfig{Bucket: "leases"}

func kvOf(t *testing.T, url string) jetstream.KeyValue {
	t.Helper()
	kv, err := jsOf(t, url).CreateOrUpdateKeyValue(t.Context(), leases)
	if err != nil {
		t.Fatal(err)
	}
	return kv
}

// TestOneHoldsTheLeaseAtATime has three contenders that take turns as the holders leave.
func TestOneHoldsTheLeaseAtATime(t *testing.T) {
	kv, _ := leaseKV(t)
	var holders, turns atomic.Int32
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 3)
	for _, name := range []string{"a", "b", "c"} {
		l := natsx.Lease{KV: kv, Key: "leader", Owner: name, Every: 20 * time.Millisecond, Log: embeddedtest.Log(t)}
		go func() {
			ended <- l.Hold(ctx, func(ctx context.Context, _ func() bool) error {
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d holders at once", n)
				}
				defer holders.Add(-1)
				turns.Add(1)
				select {
				case <-ctx.Done():
				case <-time.After(50 * time.Millisecond): // gives it up
				}
				return nil
			})
		}()
	}
	for deadline := time.Now().Add(time.Minute); turns.Load() < 6; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d turns in a minute, want 6", turns.Load())
		}
	}
	stop()
	for range 3 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

func TestALeaseIsGivenBack(t *testing.T) {
	kv, _ := leaseKV(t)
	l := natsx.Lease{KV: kv, Key: "leader", Owner: "us", Log: embeddedtest.Log(t)}
	done := errors.New("done")
	if err := l.Hold(t.Context(), func(context.Context, func() bool) error { return done }); !errors.Is(err, done) {
		t.Errorf("Hold = %v, want the error of what it ran", err)
	}
	if entry, err := kv.Get(t.Context(), "leader"); err != nil || string(entry.Value()) != "-" {
		t.Errorf("lease = %v, %v, want it given back at once", entry, err)
	}
}

// TestADeadHoldersLeaseExpires has a holder that writes no more.
func TestADeadHoldersLeaseExpires(t *testing.T) {
	kv, url := leaseKV(t)
	if _, err := kv.Put(t.Context(), "leader", []byte("dead")); err != nil {
		t.Fatal(err)
	}
	const every = 20 * time.Millisecond
	l := natsx.Lease{KV: kvOf(t, url), Key: "leader", Owner: "heir", Every: every, Log: embeddedtest.Log(t)}
	began := time.Now()
	want := errors.New("done")
	if err := l.Hold(t.Context(), func(context.Context, func() bool) error { return want }); !errors.Is(err, want) {
		t.Errorf("Hold = %v, want the error of what it ran", err)
	}
	if waited := time.Since(began); waited < 5*every {
		t.Errorf("took the lease of another after %s, want it to expire first", waited)
	}
}

// aliveKV is written to by another holder before each look.
type aliveKV struct {
	jetstream.KeyValue
	looks atomic.Int32
}

func (a *aliveKV) Get(ctx context.Context, key string) (jetstream.KeyValueEntry, error) {
	a.looks.Add(1)
	if _, err := a.Put(ctx, key, []byte("alive")); err != nil {
		return nil, err
	}
	return a.KeyValue.Get(ctx, key)
}

// TestTheLeaseOfAHolderKnownToBeGoneIsTaken has one that writes no more, and one that does.
func TestTheLeaseOfAHolderKnownToBeGoneIsTaken(t *testing.T) {
	kv, url := leaseKV(t)
	const every = 20 * time.Millisecond
	l := natsx.Lease{KV: kvOf(t, url), Key: "leader", Owner: "heir", Every: every, Expiry: time.Hour, Log: embeddedtest.Log(t), Gone: func(context.Context) bool { return true }}
	taken := errors.New("taken")
	take := func(context.Context, func() bool) error { return taken }
	if _, err := kv.Put(t.Context(), "leader", []byte("dead")); err != nil {
		t.Fatal(err)
	}
	if err := l.Hold(t.Context(), take); !errors.Is(err, taken) {
		t.Errorf("Hold = %v, want the lease of the dead taken", err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	alive := &aliveKV{KeyValue: kv}
	l.KV = alive
	go func() { ended <- l.Hold(ctx, take) }()
	for end := time.Now().Add(time.Minute); alive.looks.Load() < 20; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nobody looks")
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("Hold = %v, want nil: the holder writes", err)
	}
}

// TestALostLeaseEndsTheWork has the lease taken away under its holder.
func TestALostLeaseEndsTheWork(t *testing.T) {
	kv, _ := leaseKV(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	l := natsx.Lease{KV: kv, Key: "leader", Owner: "us", Every: 20 * time.Millisecond, Log: embeddedtest.Log(t)}
	lost := make(chan struct{})
	ended := make(chan error, 1)
	go func() {
		ended <- l.Hold(ctx, func(held context.Context, _ func() bool) error {
			if _, err := kv.Put(ctx, "leader", []byte("thief")); err != nil {
				t.Error(err)
			}
			<-held.Done()
			close(lost)
			return held.Err()
		})
	}()
	<-lost
	stop()
	if err := <-ended; err != nil {
		t.Errorf("Hold = %v, want nil", err)
	}
	if entry, err := kv.Get(t.Context(), "leader"); err != nil || string(entry.Value()) != "thief" {
		t.Errorf("lease = %v, %v, want it left to the other", entry, err)
	}
}

// TestALeaseWhoseBucketIsLostIsMadeAnew: a server that has lost its store, or whose bucket was deleted, keeps nobody from going on.
func TestALeaseWhoseBucketIsLostIsMadeAnew(t *testing.T) {
	kv, url := leaseKV(t)
	js := jsOf(t, url)
	declare := func(ctx context.Context) error {
		_, err := js.CreateOrUpdateKeyValue(ctx, leases)
		return err
	}
	var told []bool
	l := natsx.Lease{KV: kv, Key: "leader", Owner: "us", Every: 20 * time.Millisecond, Log: embeddedtest.Log(t), Declare: declare,
		Told: func(err error) { told = append(told, err == nil) }}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	done, turns := errors.New("done"), 0
	err := l.Hold(ctx, func(held context.Context, _ func() bool) error {
		if turns++; turns == 2 {
			return done
		}
		if err := js.DeleteKeyValue(ctx, leases.Bucket); err != nil {
			t.Error(err)
		}
		<-held.Done()
		return nil
	})
	if !errors.Is(err, done) || fmt.Sprint(told) != "[false true]" {
		t.Errorf("Hold = %v after %d turns, told %v, want it taken again, and both told", err, turns, told)
	}
}

// stuckKV does not write while it is stuck.
type stuckKV struct {
	jetstream.KeyValue
	stuck atomic.Bool
}

func (s *stuckKV) Update(ctx context.Context, key string, value []byte, revision uint64) (uint64, error) {
	if s.stuck.Load() {
		<-ctx.Done()
		return 0, ctx.Err()
	}
	return s.KeyValue.Update(ctx, key, value, revision)
}

// TestAHolderThatCannotWriteIsNotSure: long before another may take the lease, and as long as it lasts.
func TestAHolderThatCannotWriteIsNotSure(t *testing.T) {
	kv, _ := leaseKV(t)
	stuck := &stuckKV{KeyValue: kv}
	l := natsx.Lease{KV: stuck, Key: "leader", Owner: "us", Every: 50 * time.Millisecond, Expiry: time.Hour, Log: embeddedtest.Log(t)}
	done := errors.New("done")
	err := l.Hold(t.Context(), func(ctx context.Context, sure func() bool) error {
		for _, want := range []bool{true, false, true} {
			stuck.stuck.Store(!want)
			for end := time.Now().Add(time.Minute); sure() != want; time.Sleep(time.Millisecond) {
				if time.Now().After(end) || ctx.Err() != nil {
					t.Fatalf("sure = %v, want %v; %v", sure(), want, ctx.Err())
				}
			}
		}
		return done
	})
	if !errors.Is(err, done) {
		t.Errorf("Hold = %v", err)
	}
}

// T5: who may ask a server something can have the answer written to the key. That takes the lease from nobody, and keeps nobody from
// taking it.
func TestT5StrangeWritesDoNotTakeALease(t *testing.T) {
	kv, _ := leaseKV(t)
	litter := func() {
		if _, err := kv.Put(t.Context(), "leader", []byte(`{"stream":"WEIR_USAGE","seq":5}`)); err != nil {
			t.Error(err)
		}
	}
	held, lost := make(chan struct{}), make(chan struct{})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	l := natsx.Lease{KV: kv, Key: "leader", Owner: "us", Every: 200 * time.Millisecond, Log: embeddedtest.Log(t)}
	go func() {
		ended <- l.Hold(ctx, func(ctx context.Context, _ func() bool) error {
			close(held) // a second time would panic
			<-ctx.Done()
			close(lost)
			return nil
		})
	}()
	<-held
	for range 10 {
		litter()
		for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			if e, err := kv.Get(t.Context(), "leader"); err == nil && string(e.Value()) == "us" {
				break
			}
			if time.Now().After(end) {
				t.Fatal("the holder does not write again")
			}
		}
	}
	select {
	case <-lost:
		t.Error("the lease was lost")
	default:
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	// Another one that was killed has left its name, and litter comes all the time.
	if _, err := kv.Put(t.Context(), "leader", []byte("dead")); err != nil {
		t.Fatal(err)
	}
	ctx, stop = context.WithCancel(t.Context())
	defer stop()
	littered := make(chan struct{})
	go func() {
		defer close(littered)
		for ctx.Err() == nil {
			litter()
			time.Sleep(70 * time.Millisecond)
		}
	}()
	taken := errors.New("taken")
	l.Every = 50 * time.Millisecond
	wait, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := l.Hold(wait, func(context.Context, func() bool) error { return taken }); !errors.Is(err, taken) {
		t.Errorf("Hold = %v, want that it takes the lease", err)
	}
	stop()
	<-littered
}
