package alerting

import (
	"time"

	"github.com/weirhq/weir/schemas"
)

// verdict is what one look at a subject says.
type verdict int8

const (
	unknown verdict = iota // nothing was heard: nothing changes, bad or good
	good                   // well clear of the threshold
	between                // neither
	bad
)

const (
	// repeats within this time of each other are taken for one flapping subject.
	flapWindow = time.Hour
	// maxFlaps bounds how often the hold is doubled.
	maxFlaps = 5
)

// watch is the state of one alert about one subject. Time is counted in the steps that the detector saw, so that no clock
// that is set, and no pause of the alerter, can make an alert begin or end.
//
// An alert fires after its subject was bad for some time; time that it was not bad counts against it at half the pace, so
// that a subject that is bad every other moment is found too. A firing alert is resolved once its subject was good for the
// hold, without a break. The hold doubles with each episode that began within an hour of the last, to 32 times: with a hold
// of 10 s a subject, however fast it toggles, starts at most 16 episodes in an hour.
type watch struct {
	bad    time.Duration
	good   time.Duration
	hold   time.Duration
	firing *schemas.Alert // as it began, nil while there is no episode
}

type change int8

const (
	none change = iota
	begins
	ends
)

// step takes one look, dt after the last one. An alert that begins is set in w.firing by the caller.
func (w *watch) step(v verdict, dt, raise time.Duration) change {
	switch v {
	case unknown:
		return none
	case bad:
		w.bad, w.good = min(w.bad+dt, raise), 0
	case between:
		w.bad, w.good = max(w.bad-dt/2, 0), 0
	case good:
		w.bad, w.good = max(w.bad-dt/2, 0), w.good+dt
	}
	switch {
	case w.firing == nil && v == bad && w.bad >= raise:
		return begins
	case w.firing != nil && v == good && w.good >= w.hold:
		return ends
	}
	return none
}

// idle reports whether w remembers nothing that a new watch would not.
func (w *watch) idle() bool { return w.firing == nil && w.bad == 0 }

// past remembers how often a subject's alert began of late.
type past struct {
	began time.Time
	flaps int
}

// next is the past after another beginning.
func (p past) next(now time.Time) past {
	if p.began.IsZero() || now.Sub(p.began) > flapWindow {
		return past{began: now}
	}
	return past{began: now, flaps: min(p.flaps+1, maxFlaps)}
}

func (p past) hold(base time.Duration) time.Duration { return base << p.flaps }
