package child

import (
	"errors"
	"log/slog"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weirhq/weir/internal/obs/obstest"
)

// sleepers serves children that sleep; fail is how often a start after the first one fails.
func sleepers(t *testing.T, supervise bool, fail int) (*Server, *obstest.Lines) {
	t.Helper()
	was := again
	again = []time.Duration{time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond}
	log, starts := &obstest.Lines{}, 0
	s, err := Serve(Config{Name: "embedded Sleep", Supervise: supervise}, func() (*Process, error) {
		if starts++; starts > 1 && starts <= 1+fail {
			return nil, errors.New("address already in use")
		}
		p, err := Start(exec.Command("sleep", "1000"), func(string) {})
		if err == nil {
			p.Ready()
		}
		return p, err
	}, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
		again = was
	})
	return s, log
}

// until waits for what takes as long as it takes.
func until(ok func() bool) {
	for !ok() {
		time.Sleep(time.Millisecond)
	}
}

func TestAChildThatDiesIsStartedAgain(t *testing.T) {
	s, log := sleepers(t, true, 3)
	for n := range 2 {
		old := s.PID()
		if err := syscall.Kill(old, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		until(func() bool { return strings.Count(log.String(), "embedded Sleep is back") == n+1 })
		if pid := s.PID(); pid == old || !alive(pid) {
			t.Errorf("child %d after %d, want another one that lives", pid, old)
		}
	}
	said := log.String()
	if strings.Count(said, "level=ERROR") != 5 || !strings.Contains(said, `err="signal: killed"`) || strings.Count(said, "address already in use") != 3 {
		t.Errorf("logged %q, want how it ended and each failed start", said)
	}
	for _, wait := range []string{"in=1ms", "in=2ms", "in=5ms"} {
		if !strings.Contains(said, wait) {
			t.Errorf("logged %q, want %s", said, wait)
		}
	}
}

// What is ended on purpose stays down until it is started on purpose, and is supervised again then.
func TestAChildThatIsEndedStaysDown(t *testing.T) {
	s, log := sleepers(t, true, 0)
	for _, end := range []func() error{s.Kill, s.Stop} {
		if err := end(); err != nil {
			t.Fatal(err)
		}
		if pid := s.PID(); pid != 0 || log.String() != "" {
			t.Errorf("child %d, logged %q, want none and nothing", pid, log)
		}
		if err := s.Pause(); err == nil {
			t.Error("Pause of a server that is down is no error")
		}
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Kill(s.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(func() bool { return strings.Contains(log.String(), "is back") })
}

// Stop also ends a server that is waiting to be started again.
func TestStopEndsTheWaiting(t *testing.T) {
	s, log := sleepers(t, true, 1<<30)
	if err := syscall.Kill(s.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(func() bool { return strings.Contains(log.String(), "in=5ms") })
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if said := log.String(); strings.Contains(said, "is back") {
		t.Errorf("logged %q", said)
	}
}

func TestAChildIsLeftAloneUnlessSupervised(t *testing.T) {
	s, log := sleepers(t, false, 0)
	pid := s.PID()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(func() bool { return !alive(pid) })
	if err := s.Restart(); err != nil || s.PID() == pid || log.String() != "" {
		t.Errorf("Restart = %v, child %d, logged %q", err, s.PID(), log)
	}
}
