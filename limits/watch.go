package limits

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
)

// WatchConfig tunes a Watcher. A zero field means its default.
type WatchConfig struct {
	Settle time.Duration // a change counts once two readings this far apart agree (100ms)
	Poll   time.Duration // read the policy this often even if the file system reports no change (5s)
}

// Watcher keeps the policy of a file or folder in force, and the last good one while the files are broken or gone.
type Watcher struct {
	cfg   WatchConfig
	path  string
	log   *slog.Logger
	apply func(*Policy)

	policy atomic.Pointer[Policy]
	seen   [sha256.Size]byte // fingerprint of the last content tried; Run's alone

	mu     sync.Mutex
	status WatchStatus

	idle chan struct{} // told, if it has room, that Run has looked and found nothing new; nil but in tests
}

// WatchStatus is how reloading goes.
type WatchStatus struct {
	OK       bool      // the last content seen is the policy in force
	At       time.Time // when the policy in force was read
	Reloads  uint64    // contents that became the policy in force, the first one included
	Failures uint64    // contents that were refused
	Err      error     // why the last one was, nil when OK
}

// NewWatcher loads the policy at path, and fails if that is not possible. Run then calls apply, one call at a time, with every
// new policy whose content differs from the one in force; the first policy is not applied but returned by Policy.
func NewWatcher(cfg WatchConfig, path string, log *slog.Logger, apply func(*Policy)) (*Watcher, error) {
	cfg.Settle = cmp.Or(cfg.Settle, 100*time.Millisecond)
	cfg.Poll = cmp.Or(cfg.Poll, 5*time.Second)
	w := &Watcher{cfg: cfg, path: path, log: log, apply: apply}
	sources, err := readSources(path)
	if err != nil {
		return nil, err
	}
	p, err := build(sources)
	if err != nil {
		return nil, err
	}
	w.seen = fingerprint(sources, nil)
	w.policy.Store(p)
	w.status = WatchStatus{OK: true, At: time.Now(), Reloads: 1}
	w.announce(p)
	return w, nil
}

// Policy is the policy in force.
func (w *Watcher) Policy() *Policy { return w.policy.Load() }

// Status is how reloading goes.
func (w *Watcher) Status() WatchStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.status
}

// Run reloads the policy as its files change, until ctx ends; it then returns nil. It watches directories rather than files,
// because editors and Kubernetes replace files, and reads the files every Poll as well, because some file systems report nothing.
func (w *Watcher) Run(ctx context.Context) error {
	var changes <-chan fsnotify.Event
	var troubles <-chan error
	fs, err := fsnotify.NewWatcher()
	if err != nil {
		w.log.Warn("policy changes are found by polling only", "every", w.cfg.Poll, "err", err)
	} else {
		defer fs.Close() //nolint:errcheck // nothing was written
		changes, troubles = fs.Events, fs.Errors
	}
	watched := w.rearm(fs, nil)
	poll := time.NewTicker(w.cfg.Poll)
	defer poll.Stop()

	var due <-chan time.Time // nil, so never ready, while the files are as we know them
	var pending [sha256.Size]byte
	look := func() {
		if due == nil {
			due = time.After(w.cfg.Settle)
		}
	}
	look() // at what changed before the watch stood
	for {
		select {
		case <-changes:
			look()
		case err := <-troubles: // events were lost
			w.log.Debug("watch policy", "err", err)
			look()
		case <-poll.C:
			look()
		case <-due:
			due = nil
			watched = w.rearm(fs, watched) // first, so that no later change goes unseen
			sources, err := readSources(w.path)
			switch now := fingerprint(sources, err); now {
			case w.seen: // nothing changed, or it has changed back
				pending = w.seen
				select {
				case w.idle <- struct{}{}:
				default:
				}
			case pending:
				w.seen = now
				w.reload(sources, err)
			default: // still being written, perhaps
				pending = now
				look()
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// reload puts the policy of sources in force, or keeps the last good one.
func (w *Watcher) reload(sources []source, err error) {
	var p *Policy
	if err == nil {
		p, err = build(sources)
	}
	if err != nil {
		w.log.Error("policy not reloaded, the last good one stays in force", "path", w.path, "err", err)
	}
	w.mu.Lock()
	w.status.OK, w.status.Err = err == nil, err
	if err != nil {
		w.status.Failures++
		w.mu.Unlock()
		return
	}
	w.status.At = time.Now()
	w.status.Reloads++
	w.mu.Unlock()
	if before := w.policy.Swap(p); before.Version == p.Version {
		return
	}
	w.announce(p)
	w.apply(p)
}

func (w *Watcher) announce(p *Policy) {
	w.log.Info("policy in force", "path", w.path, "version", fmt.Sprintf("%012x", p.Version), "rules", len(p.Rules), "tenants", len(p.Tenants))
	for _, warning := range p.warnings {
		w.log.Warn("policy", "warning", warning)
	}
}

// rearm watches the directories that changes of the policy show in: where its path is, where the path's links lead now, and,
// for a folder, the folder. A directory that was replaced is a new one, hence all are watched afresh.
func (w *Watcher) rearm(fs *fsnotify.Watcher, watched []string) []string {
	if fs == nil {
		return nil
	}
	dirs := []string{filepath.Dir(w.path), w.path}
	if target, err := filepath.EvalSymlinks(w.path); err == nil {
		dirs = append(dirs, filepath.Dir(target), target)
	}
	slices.Sort(dirs)
	dirs = slices.Compact(dirs)
	for _, d := range watched {
		_ = fs.Remove(d) // it may have gone by itself
	}
	for _, d := range dirs {
		_ = fs.Add(d) // it may not be there now: the poll tries again
	}
	return dirs
}

// fingerprint tells contents, and failures to read them, from one another.
func fingerprint(sources []source, err error) [sha256.Size]byte {
	h := sha256.New()
	if err != nil {
		writePart(h, []byte("error"))
		writePart(h, []byte(err.Error()))
	}
	for _, s := range sources {
		writePart(h, []byte(s.name))
		writePart(h, s.data)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// writePart hashes b after its length, so that no two lists of parts hash alike.
func writePart(h hash.Hash, b []byte) {
	h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(b))))
	h.Write(b)
}
