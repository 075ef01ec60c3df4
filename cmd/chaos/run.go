package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/weirhq/weir/cmd/internal/rig"
	"github.com/weirhq/weir/internal/faultproxy"
)

// calm is how long requests still come when everything works again.
const calm = 300 * time.Millisecond

// judge sends load while the plan's faults happen, waits until everything is stored, and counts.
func judge(r *rig.Rig, dir string, p plan, res *result) error {
	names := slices.Sorted(maps.Keys(r.Gateways))
	j := rig.NewJournal()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	sent := make(chan struct{})
	began := time.Now()
	go func() {
		defer close(sent)
		rig.Send(ctx, j, p.Seed, p.Rate, r.Gateways)
	}()
	disturb(r, p)
	time.Sleep(max(calm, time.Until(began.Add(window+calm))))
	stop()
	<-sent
	res.requests, res.unanswered = j.Totals()
	for what, n := range j.Unexpected {
		r.Note(fmt.Sprintf("%d answers with %s", n, what))
	}

	healed := time.Now()
	err := r.Drain(names)
	res.drained = time.Since(healed)
	if err != nil {
		r.Note(err.Error()) // and see what is missing
	}
	if err := compare(r, dir, p, j, began, res); err != nil {
		return err
	}
	if p.Afterlife && err == nil && res.lost+res.doubled == 0 {
		for _, name := range names {
			if err := r.Weirs[name].Restart(); err != nil {
				return err
			}
		}
		time.Sleep(time.Second)
		if err := r.Drain(names); err != nil {
			return fmt.Errorf("afterlife: %w", err)
		}
		if err := compare(r, dir, p, j, began, res); err != nil {
			return err
		}
	}
	if n, err := r.Dead(); err != nil || n > 0 {
		return errors.Join(fmt.Errorf("%d dead letters", n), err)
	}
	for _, name := range []string{rig.Aggregator, rig.Alerter} {
		if err := r.AwaitReady(name); err != nil {
			return err
		}
		if code, err := r.Weirs[name].Term(); err != nil || code != 0 {
			return errors.Join(fmt.Errorf("%s ended with %d on SIGTERM", name, code), err)
		}
	}
	return nil
}

// remembered is how long a total stays in Redis at least.
const remembered = 50 * time.Second

// compare holds the journal against ClickHouse and Redis.
func compare(r *rig.Rig, dir string, p plan, j *rig.Journal, began time.Time, res *result) error {
	stored, err := r.Stored()
	if err != nil {
		return err
	}
	var v rig.Verdict
	v.History(j.Cells, stored)
	if !p.flushed() {
		accounts, err := r.Accounts()
		if err != nil {
			return err
		}
		totals, err := r.Totals()
		if err != nil {
			return err
		}
		if time.Since(began) < remembered {
			v.Redis(j.Cells, accounts, totals, p.killed())
		} else {
			r.Log.Warn("Redis is not compared: the run took longer than it remembers", "took", time.Since(began))
		}
	}
	res.lost, res.doubled, res.behind = v.Lost, v.Doubled, v.Behind
	if len(v.Lines) > 0 {
		text := strings.Join(v.Lines, "\n") + "\n"
		if err := os.WriteFile(filepath.Join(dir, "verdict.txt"), []byte(text), 0o644); err != nil {
			return err
		}
		for _, line := range v.Lines[:min(len(v.Lines), 5)] {
			r.Note(line)
		}
	}
	wrong, err := r.RollUps()
	for _, w := range wrong {
		r.Note(w)
	}
	return err
}

// disturb lets the plan's faults happen, each target's one after another, and returns when the last is over and everything
// runs again.
func disturb(r *rig.Rig, p plan) {
	began := time.Now()
	byTarget := map[string][]fault{}
	for _, f := range p.Faults {
		byTarget[f.Target] = append(byTarget[f.Target], f)
	}
	var all sync.WaitGroup
	for target, faults := range byTarget {
		all.Go(func() {
			for _, f := range faults {
				time.Sleep(time.Until(began.Add(f.At)))
				r.Log.Info("fault", "target", target, "kind", f.Kind, "for", f.For, "n", f.N)
				if l, ok := r.Links[target]; ok {
					disturbLink(l, f)
				} else if err := disturbPart(r, f); err != nil {
					r.Note(fmt.Sprintf("%s %s: %v", f.Kind, target, err))
				}
			}
		})
	}
	all.Wait()
	for name, part := range r.Weirs { // also one that has given up
		if err := part.Restart(); err != nil {
			r.Note(fmt.Sprintf("restart %s: %v", name, err))
		}
	}
}

func disturbPart(r *rig.Rig, f fault) error {
	p := r.Parts[f.Target]
	switch f.Kind {
	case kill:
		err := p.Kill()
		time.Sleep(f.For)
		return errors.Join(err, p.Restart())
	case term:
		_, err := p.(*rig.Weir).Term() // any exit code: it may have been cut off from everything
		time.Sleep(f.For)
		return errors.Join(err, p.Restart())
	case pause:
		err := p.Pause()
		time.Sleep(f.For)
		return errors.Join(err, p.Resume())
	case flush, forget:
		return r.FlushRedis(f.Kind == forget)
	}
	return fmt.Errorf("a part cannot be %s", f.Kind)
}

func disturbLink(l *faultproxy.Proxy, f fault) {
	var set faultproxy.Faults
	switch f.Kind {
	case cut, reset:
		l.Cut(f.Kind == reset)
		return
	case swallowA:
		l.Swallow()
		return
	case refuse:
		set.Refuse = true
	case hold:
		set.Hold = true
	case slow:
		set.Delay[faultproxy.Down] = time.Duration(f.N) * time.Millisecond
	case cutUp:
		set.CutAfter[faultproxy.Up] = f.N
	case cutDown:
		set.CutAfter[faultproxy.Down] = f.N
	}
	l.Set(set)
	if f.Kind == refuse {
		l.Cut(true)
	}
	time.Sleep(f.For)
	l.Set(faultproxy.Faults{})
}
