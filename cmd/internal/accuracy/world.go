package accuracy

import (
	"hash/fnv"
	"math/rand/v2"
	"time"
)

// world is one run: virtual time, and what happens in it, in order. Nothing in it reads a real clock, starts a goroutine or depends
// on the order of a map, so that the same seed gives the same run.
type world struct {
	sc       *scenario
	arrivals []arrival
	admitted []bool // by arrival
	now      int64  // ns since the first second of the scenario; negative while fleets start
	seed     uint64
	queue    []event
	pushed   uint64
	traffic  traffic
}

// traffic is what a fleet sent during the scenario. Negative is not known.
type traffic struct {
	messages int64 // of gateways, and to gateways
	bytes    int64 // in them
	redis    int64 // calls of Redis
}

// event is something that happens at an instant. Those of one instant happen in the order in which they were planned.
type event struct {
	at  int64
	seq uint64
	do  func()
}

func (e *event) before(o *event) bool { return e.at < o.at || e.at == o.at && e.seq < o.seq }

const (
	ms = int64(time.Millisecond)
	s  = int64(time.Second)

	warmUp = 10 * s // before the scenario's first second: fleets start and find each other

	hopMin = ms / 10 // one way between a process and a server; gateway and centre are two hops apart
	hopMax = ms / 2
)

// epoch is the wall clock's reading at the scenario's first instant.
var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// wall is the wall clock of a host that is off by skew.
func (w *world) wall(skew int64) time.Time { return epoch.Add(time.Duration(w.now + skew)) }

// at plans do for an instant, or for now if that is past.
func (w *world) at(at int64, do func()) {
	w.pushed++
	q := append(w.queue, event{max(at, w.now), w.pushed, do})
	for i := len(q) - 1; i > 0; {
		up := (i - 1) / 2
		if !q[i].before(&q[up]) {
			break
		}
		q[i], q[up] = q[up], q[i]
		i = up
	}
	w.queue = q
}

func (w *world) after(d int64, do func()) { w.at(w.now+d, do) }

// pop removes the first event.
func (w *world) pop() event {
	q := w.queue
	first, last := q[0], len(q)-1
	q[0], q[last] = q[last], event{}
	q = q[:last]
	for i := 0; ; {
		down := 2*i + 1
		if down >= len(q) {
			break
		}
		if down+1 < len(q) && q[down+1].before(&q[down]) {
			down++
		}
		if !q[down].before(&q[i]) {
			break
		}
		q[i], q[down] = q[down], q[i]
		i = down
	}
	w.queue = q
	return first
}

// run puts the scenario's arrivals and happenings before a fleet.
func (w *world) run(start func(*world) fleet) {
	w.now = -warmUp
	w.admitted = make([]bool, len(w.arrivals))
	f := start(w)
	for _, h := range w.sc.happenings {
		w.at(h.at, func() { f.happen(h) })
	}
	w.at(0, func() { w.traffic = traffic{} })
	end := int64(w.sc.seconds) * s
	for next := 0; ; {
		switch {
		case next < len(w.arrivals) && (len(w.queue) == 0 || w.arrivals[next].at < w.queue[0].at):
			w.now = w.arrivals[next].at
			f.ask(next)
			next++
		case len(w.queue) > 0 && w.queue[0].at < end:
			e := w.pop()
			w.now = e.at
			e.do()
		default:
			return
		}
	}
}

// answer says that an arrival may pass.
func (w *world) answer(i int, allowed bool) { w.admitted[i] = allowed }

// random returns a source of its own for a purpose, so that no part of the run disturbs another one's choices.
func (w *world) random(purpose string) *rand.Rand {
	return random(w.seed, w.sc.name+"/"+purpose)
}

func random(seed uint64, purpose string) *rand.Rand {
	h := fnv.New64a()
	_, _ = h.Write([]byte(purpose)) // cannot fail
	return rand.New(rand.NewPCG(seed, h.Sum64()))
}

// link is one way of a connection: what is sent arrives in order, later, or is lost.
type link struct {
	w    *world
	rng  *rand.Rand
	hops int64
	last int64 // when what was sent last arrives
}

func (w *world) link(hops int64, name string) *link {
	return &link{w: w, rng: w.random(name), hops: hops, last: -warmUp}
}

// lost says whether the next message is.
func (l *link) lost() bool { return l.w.sc.loss > 0 && l.rng.Float64() < l.w.sc.loss }

func (l *link) delay() int64 {
	d := int64(0)
	for range l.hops {
		d += hopMin + l.rng.Int64N(hopMax-hopMin)
	}
	return d
}

// send plans arrive for when a message sent after a while is there, unless it is lost on the way.
func (l *link) send(after int64, arrive func()) {
	l.w.traffic.messages++
	at := max(l.last, l.w.now+after+l.delay())
	l.last = at
	if !l.lost() {
		l.w.at(at, arrive)
	}
}
