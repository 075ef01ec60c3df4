package enforcer

import (
	"testing"
	"time"

	"github.com/weirhq/weir/enforcer/bucket"
)

func testPool(t *testing.T) (*Enforcer, *pool) {
	t.Helper()
	r, err := bucket.NewRate(100, 1, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	l := bucket.Limit{Rate: r, Burst: 12_800}
	return New(Config{}), newPool(4, &entry{limit: l, whole: l}, 0)
}

// What stripes hold counts against the burst while the bucket refills.
func TestAPoolNeverHoldsMoreThanItsBurst(t *testing.T) {
	e, p := testPool(t)
	p.take(e, 0, 1)
	if p.outstanding != 25 {
		t.Fatalf("%d tokens handed to stripes, want 25", p.outstanding)
	}
	year := int64(365 * 24 * time.Hour)
	for now := year; now < 4*year; now += year { // full again each time
		admitted := int64(0)
		for {
			d, _ := p.take(e, now, 1)
			if !d.Allowed {
				break
			}
			admitted++
		}
		if admitted > 12_800 || admitted < 12_700 {
			t.Errorf("%d admitted at one instant, want at most the burst of 12800 and 12700 at least", admitted)
		}
		p.take(e, now+int64(time.Minute), 1) // hands out credit again
		if p.outstanding == 0 {
			t.Error("no credit was handed out")
		}
	}
}

// A token that comes back after its stripe was emptied goes to the bucket: the stripe may not come to hold more than it was handed.
func TestATokenFindsItsWayHomeAfterItsStripeWasEmptied(t *testing.T) {
	e, p := testPool(t)
	p.take(e, 0, 1)
	d, from := p.take(e, 0, 1)
	if !d.Allowed || from.stripe == 0 {
		t.Fatalf("take = %+v from %+v, want it from a stripe", d, from)
	}
	p.mu.Lock()
	p.reclaim()
	p.mu.Unlock()
	p.put(1, from)
	if p.credits() != 0 || p.state.Tokens != 12_799 || p.gone != 1 {
		t.Errorf("stripes hold %d, the bucket %d, %d gone; want 0, 12799, 1", p.credits(), p.state.Tokens, p.gone)
	}
}
