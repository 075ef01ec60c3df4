package jetstream

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/weirhq/weir/schemas"
)

// TestReread: what was handled can be read once more, from any place on, no further than is asked and no older; and the server says how far
// it was handled.
func TestReread(t *testing.T) {
	_, nc, js := start(t)
	publish(t, js, "gw", 1, 7)
	raw(t, js, schemas.UsagePrefix+"gw", []byte("rubbish")) // 8
	time.Sleep(10 * time.Millisecond)
	publish(t, js, "gw", 8, 12) // 9 to 13
	s := source(t, nc, Config{MaxMessages: 3}, nil)
	if _, _, err := s.Floor(t.Context()); err == nil {
		t.Error("Floor without a consumer = nil")
	}
	j := &journal{}
	stop := run(t, s, j.handle)
	eventually(t, "all are handled", func() bool {
		_, seq, err := s.Floor(t.Context())
		return err == nil && seq == 13
	})
	if name, _, _ := s.Floor(t.Context()); name != j.batches[0].Stream {
		t.Errorf("Floor is of %q, batches of %q", name, j.batches[0].Stream)
	}
	usage, err := js.Stream(t.Context(), schemas.UsageStream)
	if err != nil {
		t.Fatal(err)
	}
	ninth, err := usage.GetMsg(t.Context(), 9)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		first, last uint64
		oldest      time.Time
		want        string
	}{
		{1, 13, time.Time{}, "[1 2 3 4 5 6 7 9 10 11 12 13]"},
		{5, 10, time.Time{}, "[5 6 7 9 10]"},
		{5, 10, ninth.Time, "[9 10]"},
		{5, 8, ninth.Time, "[]"},
		{5, 10, time.Now(), "[]"},
		{13, 99, time.Time{}, "[13]"},
		{14, 13, time.Time{}, "[]"},
		{14, 99, time.Time{}, "[]"},
	} {
		var got []uint64
		n, err := s.Reread(t.Context(), tt.first, tt.last, tt.oldest, func(_ context.Context, b schemas.Batch[*schemas.Report]) error {
			if len(b.Items) > 3 {
				t.Errorf("a batch of %d", len(b.Items))
			}
			for _, item := range b.Items {
				got = append(got, item.Seq)
			}
			return nil
		})
		if err != nil || fmt.Sprint(got) != tt.want || n != len(got) {
			t.Errorf("Reread(%d, %d, %v) = %d, %v with %v, want %s", tt.first, tt.last, tt.oldest, n, err, got, tt.want)
		}
	}
	away := errors.New("redis is away")
	if n, err := s.Reread(t.Context(), 1, 13, time.Time{}, func(context.Context, schemas.Batch[*schemas.Report]) error { return away }); n != 0 || !errors.Is(err, away) {
		t.Errorf("Reread = %d, %v, want the handler's error", n, err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if n := j.distinct(); n != 12 {
		t.Errorf("%d were handled, want 12", n)
	}
}
