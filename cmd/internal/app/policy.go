package app

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/weirhq/weir/enforcer"
	"github.com/weirhq/weir/internal/obs"
	"github.com/weirhq/weir/limits"
)

// Policy keeps the policy on disk in force in every enforcer of the process.
type Policy struct {
	watcher *limits.Watcher
	shared  *obs.Shared

	mu        sync.Mutex // guards enforcers
	enforcers []*enforcer.Enforcer
}

// NewPolicy loads the policy at path; a bad one is an error that names file and line.
func NewPolicy(path string, m *Metrics, log *slog.Logger) (*Policy, error) {
	p := &Policy{shared: m.shared}
	w, err := limits.NewWatcher(limits.WatchConfig{}, path, log, p.apply)
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", path, err)
	}
	p.watcher = w
	p.show()
	return p, nil
}

// Current is the policy in force.
func (p *Policy) Current() *limits.Policy { return p.watcher.Policy() }

// Version is that of the policy in force.
func (p *Policy) Version() uint64 { return p.Current().Version }

// Enforce puts the policy in force in e, now and whenever it changes.
func (p *Policy) Enforce(e *enforcer.Enforcer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.enforcers = append(p.enforcers, e)
	e.SetPolicy(p.Current())
}

func (p *Policy) apply(next *limits.Policy) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.enforcers {
		e.SetPolicy(next)
	}
}

func (p *Policy) show() { p.shared.Policy(p.Version(), p.watcher.Status().OK) }

// Run watches the files until ctx is done.
func (p *Policy) Run(ctx context.Context) error {
	stop := every(reloadLook, func() { p.show() })
	defer stop()
	return p.watcher.Run(ctx)
}
