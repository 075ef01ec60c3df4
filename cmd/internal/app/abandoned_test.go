package app

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/ingest/spool"
	"github.com/weirhq/weir/schemas"
)

// Whoever starts under another name is told what the name before has left, and how it is delivered; not what somebody has.
func TestAbandonedSpoolIsTold(t *testing.T) {
	data := t.TempDir()
	var kept []*spool.Spool
	for _, name := range []string{"pod-1", "pod-2", "pod-3"} {
		s, err := spool.Open(spool.Config{}, filepath.Join(data, "gateways", name, "spool"), name, "boot", slog.New(slog.DiscardHandler), nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		r := &schemas.Report{Boot: "boot", Seq: 1, Usage: []schemas.Usage{{Time: time.Now(), Tenant: "acme", Route: "orders", Allowed: 890}}}
		if err := s.Append(r); err != nil {
			t.Fatal(err)
		}
		if err := s.Commit(1); err != nil {
			t.Fatal(err)
		}
		c := s.Cell(0, 2, time.Now().UnixNano(), "acme", "orders", "", "")
		for range 10 {
			c.Add(1)
		}
		kept = append(kept, s)
	}
	if err := kept[0].Close(); err != nil { // as a kill does
		t.Fatal(err)
	}
	if err := kept[2].Close(); err != nil { // our own
		t.Fatal(err)
	}
	moved := filepath.Join(data, "gateways", "moved", "spool")
	if err := os.CopyFS(moved, os.DirFS(filepath.Join(data, "gateways", "pod-1", "spool"))); err != nil {
		t.Fatal(err)
	}
	beside := spoolsBeside(data, "pod-3", slog.New(slog.DiscardHandler))
	if len(beside) != 3 {
		t.Fatalf("beside us are %v, want 3 others", beside)
	}
	for name, c := range map[string]struct {
		stored   schemas.Stored
		err      error
		requests string // of pod-1; none where nothing is told
		left     int    // for a later look
	}{
		"nothing is stored":   {requests: "requests=900 "},
		"its report is":       {stored: schemas.Stored{Boots: map[string]schemas.Ranges{"boot": {{1, 1}}}}, requests: "requests=10 "},
		"all of it is":        {stored: schemas.Stored{Boots: map[string]schemas.Ranges{"boot": {{1, 2}}}}},
		"nobody can say now":  {err: errors.New("away"), left: 2},
		"others' reports are": {stored: schemas.Stored{Boots: map[string]schemas.Ranges{"other": {{1, 2}}}}, requests: "requests=900 "},
	} {
		var out bytes.Buffer
		left := warnAbandoned(t.Context(), beside, func(_ context.Context, of string) (*schemas.Stored, error) {
			if of != "pod-1" {
				t.Errorf("%s: asked for what is stored of %s", name, of)
			}
			return &c.stored, c.err
		}, slog.New(slog.NewTextHandler(&out, nil)))
		want := 2 // the spool, and the one that was moved
		if c.requests == "" {
			want = 0
		}
		text := out.String()
		if len(left) != c.left || strings.Count(text, "\n") != want || strings.Count(text, "of=pod-1 "+c.requests) != want || strings.Count(text, "--name pod-1,") != want ||
			strings.Count(text, "its_place="+filepath.Join(data, "gateways", "pod-1", "spool")) != want || want > 0 && !strings.Contains(text, "spool="+moved) {
			t.Errorf("%s: %d left, told %q, want %d lines about %sof pod-1", name, len(left), text, want, c.requests)
		}
	}
}
