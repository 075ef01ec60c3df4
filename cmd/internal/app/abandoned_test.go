package app

import (
	"bytes"
	"log/slog"
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
	var out bytes.Buffer
	warnAbandoned(data, "pod-3", slog.New(slog.NewTextHandler(&out, nil)))
	if text := out.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "of=pod-1") || !strings.Contains(text, "requests=900") || !strings.Contains(text, "--name pod-1") {
		t.Errorf("told %q, want one line about 900 requests of pod-1", text)
	}
}
