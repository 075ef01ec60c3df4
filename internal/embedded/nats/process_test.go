package nats

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// TestProcessKeepsWhatItAcknowledged kills and freezes a server in a process of its own.
func TestProcessKeepsWhatItAcknowledged(t *testing.T) {
	p, err := StartProcess(Config{Dir: t.TempDir()}, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	}()
	nc, err := nats.Connect(p.URL(), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(ctx, "s", []byte("one")); err != nil {
		t.Fatal(err)
	}

	url := p.URL()
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := p.Pause(); err == nil {
		t.Error("a dead server can be frozen")
	}
	if err := p.Restart(); err != nil {
		t.Fatal(err)
	}
	if p.URL() != url {
		t.Errorf("URL is %s after a restart, was %s", p.URL(), url)
	}
	for ack := (*jetstream.PubAck)(nil); ack == nil; time.Sleep(10 * time.Millisecond) {
		if ack, err = js.Publish(ctx, "s", []byte("two")); ctx.Err() != nil {
			t.Fatalf("publish after the restart: %v", err)
		}
		if ack != nil && ack.Sequence != 2 {
			t.Errorf("the second message is number %d: the first was lost", ack.Sequence)
		}
	}

	if err := p.Pause(); err != nil {
		t.Fatal(err)
	}
	short, stop := context.WithTimeout(ctx, 50*time.Millisecond)
	defer stop()
	if _, err := js.Publish(short, "s", []byte("three")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a frozen server answers: %v", err)
	}
	if err := p.Resume(); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(ctx, "s", []byte("four")); err != nil {
		t.Errorf("after Resume: %v", err)
	}
}
