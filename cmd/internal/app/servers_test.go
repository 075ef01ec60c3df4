package app

import (
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weirhq/weir/internal/run"

	"github.com/weirhq/weir/internal/obs/obstest"
)

// The servers of weir up that somebody kills are missed, and started again.
func TestEmbeddedServersThatDieComeBack(t *testing.T) {
	log := &obstest.Lines{}
	var stack run.Stack
	if _, err := Embed(Servers{NATS: "nats://127.0.0.1:1"}, t.TempDir(), &stack, slog.New(slog.NewTextHandler(log, nil))); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := stack.Stop(time.Minute); err != nil {
			t.Error(err)
		}
	}()
	pids := regexp.MustCompile(`pid=(\d+)`).FindAllStringSubmatch(log.String(), -1)
	if len(pids) != 2 {
		t.Fatalf("logged %q, want the ids of two children", log)
	}
	for _, m := range pids {
		pid, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	for end := time.Now().Add(time.Minute); strings.Count(log.String(), "is back") < 2; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not back in a minute: %s", log)
		}
	}
	if n := strings.Count(log.String(), "signal: killed"); n != 2 {
		t.Errorf("logged %d times how a child ended, want 2: %s", n, log)
	}
}
