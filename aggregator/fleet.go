package aggregator

import (
	"maps"
	"slices"
	"time"
)

// departure is the end of one life of a gateway.
type departure struct {
	boot string
	at   time.Time
}

// life is one process of a gateway's name.
type life struct {
	boot        string
	first, last time.Time // sign of it
}

// namesakes are the processes of one name that live, the one that was heard last at the end: one, unless two gateways were given one name.
type namesakes struct {
	lives  []life // at most maxLives
	warned time.Time
}

const (
	maxLives  = 4
	warnAgain = time.Minute
)

// heard notes a sign of life of boot, and says whether another has spoken since its last one. Those that were silent for expiry are
// forgotten.
func (n *namesakes) heard(boot string, at time.Time, expiry time.Duration) (inTurns bool) {
	n.lives = slices.DeleteFunc(n.lives, func(l life) bool { return at.Sub(l.last) > expiry })
	l := life{boot, at, at}
	if i := n.index(boot); i >= 0 {
		l.first, inTurns = n.lives[i].first, i < len(n.lives)-1
		n.lives = slices.Delete(n.lives, i, i+1)
	}
	n.lives = append(n.lives[max(0, len(n.lives)-maxLives+1):], l)
	return inTurns
}

// left takes boot out, and says whether another lives that was heard since boot began.
func (n *namesakes) left(boot string, at time.Time, expiry time.Duration) (others bool) {
	n.heard(boot, at, expiry)
	last := len(n.lives) - 1
	began := n.lives[last].first
	n.lives = n.lives[:last]
	return slices.ContainsFunc(n.lives, func(l life) bool { return !l.last.Before(began) })
}

func (n *namesakes) index(boot string) int {
	return slices.IndexFunc(n.lives, func(l life) bool { return l.boot == boot })
}

// delay finds out how much later than usual a gateway's report comes, without a clock that both sides agree on: the smallest
// difference of the two clocks in the last seconds is that of a report that was not delayed.
type delay struct {
	least, before time.Duration // of this while, and of the one before
	since         time.Time
}

const (
	delayWhile = 10 * time.Second
	delayMax   = 5 * time.Second // more is taken for a clock that was set
)

func (d *delay) of(sealed, now time.Time) time.Duration {
	diff := now.Sub(sealed)
	if now.Sub(d.since) > delayWhile {
		d.before = d.least
		if d.since.IsZero() {
			d.before = diff
		}
		d.least, d.since = diff, now
	}
	d.least = min(d.least, diff)
	return min(diff-d.usual(), delayMax)
}

// usual is the difference of the clocks where a report is not delayed.
func (d *delay) usual() time.Duration { return min(d.least, d.before) }

// late is how much later than usual a report comes, 0 as long as nobody knows what is usual.
func (d *delay) late(sealed, now time.Time) time.Duration {
	if d.since.IsZero() {
		return 0
	}
	return now.Sub(sealed) - d.usual()
}

// age tells of each report how old it is. The last ones of a gateway that has left are charged, and say nothing of what it holds. What an
// earlier life of one that is there has left for long is no news of it, and not charged where the bucket was filled again since.
func (a *Aggregator) age(folds []Fold, now time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range folds {
		for j := range folds[i].Uses {
			u := &folds[i].Uses[j]
			if left, ok := a.left[u.Gateway]; ok && left.boot == u.Boot {
				u.late, u.DemandNanos = true, 0
			}
			if u.Sealed.IsZero() {
				continue
			}
			d := a.delays[u.Gateway]
			if d == nil {
				if _, lives := a.fleet[u.Gateway]; !lives {
					continue // a late word of one that is gone
				}
				d = &delay{}
				a.delays[u.Gateway] = d
			}
			if n, late := a.names[u.Gateway], d.late(u.Sealed, now); n != nil && len(n.lives) > 0 && n.index(u.Boot) < 0 && late > delayMax {
				u.late, u.DemandNanos = true, 0
				if late > folds[i].Limit.fills() {
					u.From, u.Settled = u.Cum, u.Cum
				}
			}
			u.Age = d.of(u.Sealed, now)
		}
	}
}

// saw notes that gateway lives.
func (a *Aggregator) saw(gateway string, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	last, known := a.fleet[gateway]
	if at.After(last) {
		a.fleet[gateway] = at
	}
	if !known {
		a.fleetChanged()
		a.log.Info("gateway joined", "gateway", gateway, "gateways", len(a.fleet))
	}
}

// spoke notes which process of a gateway's name has spoken, and warns of two that do so in turns.
func (a *Aggregator) spoke(gateway, boot string, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.names[gateway]
	if n == nil {
		n = &namesakes{}
		a.names[gateway] = n
	}
	if !n.heard(boot, at, a.cfg.FleetExpiry) || !n.warned.IsZero() && at.Sub(n.warned) < warnAgain {
		return
	}
	n.warned = at
	boots := make([]string, len(n.lives))
	for i, l := range n.lives {
		boots[i] = l.boot
	}
	a.log.Warn("more than one process has the name of this gateway: each takes the whole share of one. Give each its own", "gateway", gateway, "boots", boots)
}

// fleetChanged makes all shares due for a look. mu is held.
func (a *Aggregator) fleetChanged() {
	a.m.Gateways.Set(float64(len(a.fleet)))
	a.trim(0)
	for _, e := range a.keys {
		e.asked = time.Time{}
	}
}

// expire drops silent gateways.
func (a *Aggregator) expire() {
	a.mu.Lock()
	defer a.mu.Unlock()
	gone := false
	for g, at := range a.fleet {
		if a.cfg.Now().Sub(at) > a.cfg.FleetExpiry {
			a.forget(g)
			a.log.Warn("gateway is silent", "gateway", g, "gateways", len(a.fleet))
			gone = true
		}
	}
	if gone {
		a.fleetChanged()
	}
	for g, d := range a.left {
		if a.cfg.Now().Sub(d.at) > a.cfg.Late {
			delete(a.left, g)
		}
	}
}

// leave takes a gateway out of the fleet that said so, and divides what it had, unless another process has its name.
func (a *Aggregator) leave(gateway, boot string, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.left[gateway] = departure{boot, at}
	n := a.names[gateway]
	others := n != nil && n.left(boot, at, a.cfg.FleetExpiry)
	if _, known := a.fleet[gateway]; !known || others {
		return
	}
	a.forget(gateway)
	a.log.Info("gateway left", "gateway", gateway, "gateways", len(a.fleet))
	a.fleetChanged()
	a.fewer = true
	a.alarm()
}

// hasLeft says whether this life of a gateway is over.
func (a *Aggregator) hasLeft(gateway, boot string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	left, ok := a.left[gateway]
	return ok && left.boot == boot
}

// forget drops a gateway and what it held. mu is held.
func (a *Aggregator) forget(gateway string) {
	delete(a.fleet, gateway)
	delete(a.names, gateway)
	delete(a.delays, gateway)
	for _, e := range a.keys {
		delete(e.held, gateway)
	}
	a.m.ClockOffset.DeleteLabelValues(gateway)
}

// gateways is the fleet in order. mu is held.
func (a *Aggregator) gateways() []string { return slices.Sorted(maps.Keys(a.fleet)) }
