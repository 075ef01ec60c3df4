package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// calm is how long requests still come when everything works again.
const calm = 300 * time.Millisecond

// judge sends load while the plan's faults happen, waits until everything is stored, and counts.
func (r *rig) judge(p plan, res *result) error {
	names := p.names()
	at := map[string]string{}
	for _, name := range names {
		at[name] = r.links[link("load", name)].Addr()
	}
	j := newJournal()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	sent := make(chan struct{})
	began := time.Now()
	go func() {
		defer close(sent)
		send(ctx, j, p.Seed, p.Rate, at, names)
	}()
	r.disturb(p)
	time.Sleep(max(calm, time.Until(began.Add(window+calm))))
	stop()
	<-sent
	res.requests, res.unanswered = j.totals()
	for what, n := range j.unexpected {
		r.note(fmt.Sprintf("%d answers with %s", n, what))
	}

	healed := time.Now()
	err := r.drain(names)
	res.drained = time.Since(healed)
	if err != nil {
		r.note(err.Error()) // and see what is missing
	}
	if err := r.compare(p, j, began, res); err != nil {
		return err
	}
	if p.Afterlife && err == nil && res.lost+res.doubled == 0 {
		for _, name := range names {
			if err := r.weirs[name].Restart(); err != nil {
				return err
			}
		}
		time.Sleep(time.Second)
		if err := r.drain(names); err != nil {
			return fmt.Errorf("afterlife: %w", err)
		}
		if err := r.compare(p, j, began, res); err != nil {
			return err
		}
	}
	if n, err := r.dead(); err != nil || n > 0 {
		return errors.Join(fmt.Errorf("%d dead letters", n), err)
	}
	for _, name := range []string{"aggregator", "alerter"} {
		if code, err := r.weirs[name].Term(); err != nil || code != 0 {
			return errors.Join(fmt.Errorf("%s ended with %d on SIGTERM", name, code), err)
		}
	}
	return nil
}

// remembered is how long a total stays in Redis at least.
const remembered = time.Minute

// compare holds the journal against ClickHouse and Redis.
func (r *rig) compare(p plan, j *journal, began time.Time, res *result) error {
	stored, err := r.stored()
	if err != nil {
		return err
	}
	var v verdict
	v.history(j.cells, stored)
	if !p.flushed() {
		totals, err := r.totals()
		if err != nil {
			return err
		}
		if time.Since(began) < remembered {
			v.redis(j.cells, totals)
		} else {
			r.log.Warn("Redis is not compared: the run took longer than it remembers", "took", time.Since(began))
		}
	}
	res.lost, res.doubled = v.Lost, v.Doubled
	if len(v.Lines) > 0 {
		text := strings.Join(v.Lines, "\n") + "\n"
		if err := os.WriteFile(filepath.Join(r.dir, "verdict.txt"), []byte(text), 0o644); err != nil {
			return err
		}
		for _, line := range v.Lines[:min(len(v.Lines), 5)] {
			r.note(line)
		}
	}
	wrong, err := r.rollups()
	for _, w := range wrong {
		r.note(w)
	}
	return err
}
