package aggregator

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/schemas"
)

// named is a fleet whose gateways' names may be taken twice, and what the log says of it.
type named struct {
	*Aggregator
	now time.Time
	log bytes.Buffer
}

func newNamed() *named {
	n := &named{now: time.Unix(1_800_000_000, 0)}
	n.Aggregator = New(Config{Learn: -1, Now: func() time.Time { return n.now }}, &nothing{}, &nothing{}, slog.New(slog.NewTextHandler(&n.log, nil)), nil)
	return n
}

// beat lets boots of one name speak every second for d, in this order.
func (n *named) beat(d time.Duration, boots ...string) {
	for range d / time.Second {
		for _, b := range boots {
			n.Heartbeat(&schemas.Heartbeat{Gateway: "g1", Boot: b}, n.now)
		}
		n.now = n.now.Add(time.Second)
		n.expire()
	}
}

func (n *named) stop(boot string) {
	n.Heartbeat(&schemas.Heartbeat{Gateway: "g1", Boot: boot, Mode: schemas.ModeStopped}, n.now)
}

// warnings are the lines of the log at that level since the last call.
func (n *named) warnings() (all []string) {
	for line := range strings.Lines(n.log.String()) {
		if strings.Contains(line, "level=WARN") {
			all = append(all, line)
		}
	}
	n.log.Reset()
	return all
}

func (n *named) wantFleet(t *testing.T, when string, want int) {
	t.Helper()
	if got := len(n.fleet); got != want {
		t.Errorf("%s: %d gateways in the fleet, want %d", when, got, want)
	}
}

// TestTwoOfOneName: two processes that bear one name are told of once a minute, and while one of them lives the gateway does.
func TestTwoOfOneName(t *testing.T) {
	for _, boots := range [][]string{{"boot-a", "boot-b"}, {"boot-a", "boot-b", "boot-c"}} {
		n := newNamed()
		n.beat(150*time.Second, boots...)
		said := n.warnings()
		if len(said) != 3 {
			t.Errorf("in two and a half minutes %d processes of one name were told of %d times, want 3: %q", len(boots), len(said), said)
		}
		for _, line := range said {
			for _, b := range boots {
				if !strings.Contains(line, b) || !strings.Contains(line, "gateway=g1") {
					t.Errorf("%s is not in %q", b, line)
				}
			}
		}
		for len(boots) > 1 {
			n.stop(boots[0])
			n.wantFleet(t, boots[0]+" has stopped", 1)
			n.Heartbeat(&schemas.Heartbeat{Gateway: "g1", Boot: boots[0]}, n.now) // one that was under way
			if boots = boots[1:]; len(boots) == 1 {
				n.warnings()
			}
			n.beat(2*time.Minute, boots...)
			n.wantFleet(t, "a while later", 1)
		}
		if said := n.warnings(); len(said) > 0 {
			t.Errorf("of one process that is left: %q", said)
		}
		n.stop(boots[0])
		n.wantFleet(t, "the last has stopped", 0)
		if len(n.names) != 0 {
			t.Errorf("%d names of nobody are kept", len(n.names))
		}
	}
}

// TestOneLifeAfterTheOther: a gateway that comes again is not two, however the life before has ended, and leaves when it says so.
func TestOneLifeAfterTheOther(t *testing.T) {
	n := newNamed()
	n.beat(10*time.Second, "boot-z", "boot-a")
	n.warnings()
	n.beat(10*time.Second, "boot-a") // the other was killed
	n.stop("boot-a")
	n.wantFleet(t, "one has stopped long after another had died", 0)
	n.beat(10*time.Second, "boot-a2") // is killed
	for _, boot := range []string{"boot-b", "boot-c", "boot-d", "boot-e", "boot-f"} {
		n.beat(time.Second, boot)
	}
	n.stop("boot-f")
	n.wantFleet(t, "one has stopped that was begun after another had died", 0)
	n.beat(10*time.Second, "boot-g")
	n.Heartbeat(&schemas.Heartbeat{Gateway: "g1", Boot: "boot-h"}, n.now) // the next one is there before it stops
	n.stop("boot-g")
	n.wantFleet(t, "the one before has stopped", 1)
	n.beat(10*time.Second, "boot-h")
	n.wantFleet(t, "a while later", 1)
	if said := n.warnings(); len(said) > 0 {
		t.Errorf("said %q", said)
	}
	n.beat(time.Second, "boot-i", "boot-h")
	n.now = n.now.Add(time.Minute)
	n.expire()
	if len(n.names) != 0 {
		t.Errorf("%d names of the silent are kept", len(n.names))
	}
	// what a process that has stopped still had says nothing of the other's demand
	n.beat(2*time.Second, "boot-j", "boot-k")
	n.stop("boot-j")
	folds := []Fold{{Uses: []Use{{Gateway: "g1", Boot: "boot-j", DemandNanos: 1}, {Gateway: "g1", Boot: "boot-k", DemandNanos: 1}}}}
	n.age(folds, n.now)
	if u := folds[0].Uses; !u[0].late || u[1].late || u[1].DemandNanos != 1 {
		t.Errorf("reports of one that has stopped and of one that has not: %+v", u)
	}
}

// TestWhatAnEarlierLifeHasLeft: what a gateway finds in its spool of a life before it is counted. When it is old it says nothing of what is
// so now, and it is not charged if the bucket was filled since; the clocks of gateway and centre may differ.
func TestWhatAnEarlierLifeHasLeft(t *testing.T) {
	for _, skew := range []time.Duration{0, time.Hour, -time.Hour} {
		n := newNamed()
		n.beat(10*time.Second, "boot-a")
		n.beat(10*time.Second, "boot-b")
		use := func(boot string, age time.Duration) Use {
			return Use{Gateway: "g1", Boot: boot, Cum: 9, From: 4, DemandNanos: 1, Sealed: n.now.Add(skew - age)}
		}
		for _, limit := range []Limit{{100e9, 100}, {16_666_667, 300}} { // full in a second, and in five hours
			folds := []Fold{{Limit: limit, Uses: []Use{use("boot-b", 0), use("boot-a", time.Minute), use("boot-a", time.Second), use("boot-b", time.Minute), use("boot-c", 0)}}}
			n.age(folds, n.now)
			for i, old := range []bool{false, true, false, false, false} {
				u, free := &folds[0].Uses[i], old && limit.Burst == 100
				if u.late != old || (u.From == u.Cum && u.Settled == u.Cum) != free || (u.DemandNanos == 0) != old {
					t.Errorf("clocks %v apart, %v, report %d: %+v, want old: %v, free: %v", skew, limit, i, *u, old, free)
				}
			}
		}
	}
}
