package limits

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"

	"github.com/weirhq/weir/internal/obs/obstest"
)

// patience ends a test that waits for what does not come; no test passes by it.
const patience = 20 * time.Second

// policyText is a policy whose contract has the given burst.
func policyText(burst int) string {
	return fmt.Sprintf("version: 1\nrules:\n%s  - {name: contract, layer: contract, key: [tenant], rate: 1/h, burst: %d}\n", guardRule, burst)
}

// watched is a running Watcher.
type watched struct {
	*Watcher
	t       *testing.T
	applied chan *Policy
	logged  *obstest.Lines
}

func startWatcher(t *testing.T, cfg WatchConfig, path string) *watched {
	t.Helper()
	w := &watched{t: t, applied: make(chan *Policy, 100), logged: &obstest.Lines{}}
	var err error
	w.Watcher, err = NewWatcher(cfg, path, slog.New(slog.NewTextHandler(w.logged, nil)), func(p *Policy) { w.applied <- p })
	if err != nil {
		t.Fatal(err)
	}
	w.idle = make(chan struct{}, 1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v", err)
		}
	})
	<-w.idle // the watches stand: what changes from here on must be noticed
	return w
}

// wantBurst waits for a new policy and checks the burst of its contract.
func (w *watched) wantBurst(want int64) {
	w.t.Helper()
	select {
	case p := <-w.applied:
		if got := p.Rules[1].Fixed.Burst; got != want || w.Policy() != p {
			w.t.Fatalf("burst = %d, want %d, in force", got, want)
		}
	case <-time.After(patience):
		w.t.Fatalf("no new policy, want burst %d; status %+v", want, w.Status())
	}
}

// wantFailures waits until that many contents have been refused.
func (w *watched) wantFailures(want uint64) {
	w.t.Helper()
	for deadline := time.Now().Add(patience); w.Status().Failures < want; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("status %+v, want %d failures", w.Status(), want)
		}
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventsOnly leaves finding changes to the file system.
var eventsOnly = WatchConfig{Settle: 20 * time.Millisecond, Poll: time.Hour}

func TestReloadWaysOfReplacing(t *testing.T) {
	t.Run("in place", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "p.yaml")
		write(t, path, policyText(5))
		w := startWatcher(t, eventsOnly, path)
		write(t, path, policyText(6))
		w.wantBurst(6)
		write(t, path, policyText(7))
		w.wantBurst(7)
	})
	t.Run("atomic rename", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "p.yaml")
		write(t, path, policyText(5))
		w := startWatcher(t, eventsOnly, path)
		for burst := 6; burst < 9; burst++ {
			write(t, path+".tmp", policyText(burst))
			must(t, os.Rename(path+".tmp", path))
			w.wantBurst(int64(burst))
		}
	})
	t.Run("delete and recreate", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "p.yaml")
		write(t, path, policyText(5))
		w := startWatcher(t, eventsOnly, path)
		must(t, os.Remove(path))
		w.wantFailures(1)
		if w.Policy().Rules[1].Fixed.Burst != 5 {
			t.Error("the last good policy is not in force")
		}
		write(t, path, policyText(6))
		w.wantBurst(6)
	})
	kubernetes := func(t *testing.T, path func(mount string) string) {
		mount := t.TempDir()
		update := func(n, burst int) {
			data := filepath.Join(mount, fmt.Sprintf("..2026_%d", n))
			must(t, os.Mkdir(data, 0o755))
			write(t, filepath.Join(data, "p.yaml"), policyText(burst))
			must(t, os.Symlink(filepath.Base(data), filepath.Join(mount, "..data_tmp")))
			must(t, os.Rename(filepath.Join(mount, "..data_tmp"), filepath.Join(mount, "..data")))
			if n > 1 {
				must(t, os.RemoveAll(filepath.Join(mount, fmt.Sprintf("..2026_%d", n-1))))
			}
		}
		update(1, 5)
		must(t, os.Symlink("..data/p.yaml", filepath.Join(mount, "p.yaml")))
		w := startWatcher(t, eventsOnly, path(mount))
		for n := 2; n < 5; n++ {
			update(n, 4+n)
			w.wantBurst(int64(4 + n))
		}
	}
	t.Run("Kubernetes file", func(t *testing.T) {
		kubernetes(t, func(mount string) string { return filepath.Join(mount, "p.yaml") })
	})
	t.Run("Kubernetes folder", func(t *testing.T) { kubernetes(t, func(mount string) string { return mount }) })
	t.Run("symlink into another folder", func(t *testing.T) {
		dir, other := t.TempDir(), t.TempDir()
		write(t, filepath.Join(other, "real.yaml"), policyText(5))
		must(t, os.Symlink(filepath.Join(other, "real.yaml"), filepath.Join(dir, "p.yaml")))
		w := startWatcher(t, eventsOnly, filepath.Join(dir, "p.yaml"))
		write(t, filepath.Join(other, "real.yaml"), policyText(6))
		w.wantBurst(6)
	})
	t.Run("folder replaced", func(t *testing.T) {
		top := t.TempDir()
		for n, name := range []string{"one", "two"} {
			must(t, os.Mkdir(filepath.Join(top, name), 0o755))
			write(t, filepath.Join(top, name, "p.yaml"), policyText(5+n))
		}
		live := filepath.Join(top, "live")
		must(t, os.Symlink("one", live))
		w := startWatcher(t, eventsOnly, live)
		must(t, os.Symlink("two", live+".tmp"))
		must(t, os.Rename(live+".tmp", live))
		w.wantBurst(6)
		write(t, filepath.Join(top, "two", "p.yaml"), policyText(7)) // the new one is watched
		w.wantBurst(7)
	})
	t.Run("file added to a folder", func(t *testing.T) {
		dir := t.TempDir()
		write(t, filepath.Join(dir, "1.yaml"), policyText(5))
		w := startWatcher(t, eventsOnly, dir)
		write(t, filepath.Join(dir, "1.yaml.swp"), "\x00") // B078
		write(t, filepath.Join(dir, "2.yaml"), "version: 1\nrules:\n  - {name: more, layer: route, key: [route], rate: 1/s}\n")
		w.wantBurst(5)
		if n := len(w.Policy().Rules); n != 3 {
			t.Errorf("%d rules, want 3", n)
		}
	})
	t.Run("nothing reported", func(t *testing.T) { // two links away, where no watch is
		dir, middle, other := t.TempDir(), t.TempDir(), t.TempDir()
		for n, name := range []string{"a.yaml", "b.yaml"} {
			write(t, filepath.Join(other, name), policyText(5+n))
		}
		must(t, os.Symlink(filepath.Join(other, "a.yaml"), filepath.Join(middle, "m.yaml")))
		must(t, os.Symlink(filepath.Join(middle, "m.yaml"), filepath.Join(dir, "p.yaml")))
		w := startWatcher(t, WatchConfig{Settle: 5 * time.Millisecond, Poll: 20 * time.Millisecond}, filepath.Join(dir, "p.yaml"))
		must(t, os.Symlink(filepath.Join(other, "b.yaml"), filepath.Join(middle, "tmp")))
		must(t, os.Rename(filepath.Join(middle, "tmp"), filepath.Join(middle, "m.yaml")))
		w.wantBurst(6)
	})
}

func TestB042BrokenReloadKeepsTheLastGoodPolicy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p.yaml")
	write(t, path, policyText(5))
	w := startWatcher(t, eventsOnly, path)
	tenOf := func() (allowed int) {
		l, _ := w.Policy().Rules[1].Limit(w.Policy(), "tenant")
		s := bucket.Full(l, 0)
		for range 10 {
			if s.Take(l, 0, 1).Allowed {
				allowed++
			}
		}
		return allowed
	}
	steps := []struct{ name, text, want string }{
		{"tab", "version: 1\nrules:\n\t- {name: guard}\n", path + ":3: tab in the indentation"},
		{"decimal burst", strings.Replace(policyText(5), "burst: 5", "burst: 0.9", 1), path + ":4: rules[1].burst: want a whole number"},
		{"word as rate", strings.Replace(policyText(5), "1/h", `"five"`, 1), path + `:4: rules[1].rate: \"five\" is not a rate`},
		{"empty", "", path + ":1: file is empty"},
		{"dashes", "---\n", path + ":1: file is empty"},
		{"noise", "version: 1\n\x7fELF\x00\xff\x01", path + ":2: not a text file"},
		{"removed", "", "no such file"},
		{"without the plan in use", policyText(5) + "tenants: {acme: {plan: gold}}\n", path + ":5: tenants.acme.plan: there is no plan"},
		{"without a guard", "version: 1\n", "no rule has layer: guard"},
		{"50 MB", strings.Repeat("a: *b\n", 50<<20/6), path + ":1: file is larger"},
	}
	for n, step := range steps {
		if step.name == "removed" {
			must(t, os.Remove(path))
		} else {
			write(t, path, step.text)
		}
		w.wantFailures(uint64(n + 1))
		status := w.Status()
		if status.OK || status.Err == nil || status.Reloads != 1 {
			t.Errorf("%s: status %+v, want not OK", step.name, status)
		}
		if got := tenOf(); got != 5 {
			t.Errorf("%s: %d of 10 allowed, want 5", step.name, got)
		}
		if _, err := Load(path); err == nil {
			t.Errorf("%s: starting with it works", step.name)
		}
		if log := w.logged.String(); !strings.Contains(log, step.want) {
			t.Errorf("%s: want %s in the log:\n%s", step.name, step.want, log)
		}
	}
	if n := strings.Count(w.logged.String(), "level=ERROR"); n != len(steps) {
		t.Errorf("%d errors logged, want %d: one for each content", n, len(steps))
	}
	write(t, path, policyText(7))
	w.wantBurst(7)
	if got, status := tenOf(), w.Status(); got != 7 || !status.OK || status.Err != nil || status.Reloads != 2 {
		t.Errorf("%d of 10 allowed, status %+v; want 7 and OK", got, status)
	}
}

// The same bad content is reported once, however often it is read; and content that says the same is in force without being applied.
func TestReloadIsQuiet(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p.yaml")
	write(t, path, policyText(5))
	w := startWatcher(t, WatchConfig{Settle: time.Millisecond, Poll: time.Millisecond}, path)
	write(t, path, "version: 1\n")
	w.wantFailures(1)
	for range 20 {
		write(t, path+".tmp", "version: 1\n")
		must(t, os.Rename(path+".tmp", path))
		time.Sleep(2 * time.Millisecond)
	}
	write(t, path+".tmp", "# a remark\n"+policyText(5))
	must(t, os.Rename(path+".tmp", path))
	for deadline := time.Now().Add(patience); !w.Status().OK; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("status %+v, want OK", w.Status())
		}
	}
	if s := w.Status(); s.Failures != 1 || s.Reloads != 2 || len(w.applied) != 0 || strings.Count(w.logged.String(), "level=ERROR") != 1 {
		t.Errorf("status %+v, %d applied, log\n%s", s, len(w.applied), w.logged)
	}
}

func TestNewWatcherWithBadFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p.yaml")
	write(t, path, "version: 1\n")
	if _, err := NewWatcher(WatchConfig{}, path, slog.New(slog.DiscardHandler), nil); err == nil {
		t.Error("NewWatcher takes a policy without a guard")
	}
	if _, err := NewWatcher(WatchConfig{}, path+"x", slog.New(slog.DiscardHandler), nil); err == nil {
		t.Error("NewWatcher takes a missing file")
	}
}
