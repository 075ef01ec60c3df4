package aggregator

import (
	"context"
	"math"
	"time"

	"github.com/weirhq/weir/schemas"
)

// Counter holds the global bucket of every key. Shared time is its own clock, never the caller's. It may be used from any
// goroutine and by several aggregators at once.
type Counter interface {
	// Fold applies each fold to its key, atomically per key, and returns the states afterwards, in the same order. Folding the
	// same thing again changes nothing but versions. After an error some folds may have been applied: fold all of them again.
	Fold(ctx context.Context, folds []Fold) ([]KeyState, error)

	// Mark makes keys live for a minute: gateways hold shares of them that a gateway without a share would not guess.
	Mark(ctx context.Context, keys []Key) error

	// Take takes tokens of keys whose limits are kept strictly, each as if it were alone and in order. It is not for repeating:
	// after an error some may have been taken.
	Take(ctx context.Context, takes []Take) ([]Taken, error)

	// Epoch begins an epoch of the centre, above all that were begun before, also over a loss of the counter's memory.
	Epoch(ctx context.Context) (uint64, error)

	// Live returns the states of all live keys, at most some hundred thousand. A key that was forgotten is left out.
	Live(ctx context.Context) ([]KeyState, error)
}

// Key names a bucket. Any bytes may stand in it.
type Key struct{ Rule, Key string }

// Take asks for tokens of one key: all of them or none.
type Take struct {
	Key   Key
	Limit Limit
	Cost  int64 // below 0: give back
}

// Taken is the answer to a Take.
type Taken struct {
	OK          bool
	LevelMicros int64         // afterwards
	Wait        time.Duration // 0 when OK; else until the same would be; below 0 for ever
}

// Fold is all that one batch says about one key. Without uses it only lets time pass.
type Fold struct {
	Key   Key
	Limit Limit // in force from now on
	Uses  []Use

	Strict      bool    // a key that is not there has what it earned since the counter began to remember, and is not full
	Last        *Level  // of a key that is not there: what it had when somebody saw it last, from where time passes; nil for full
	Grants      bool    // the key is kept by grants: what its full bucket would have earned pays for nothing
	Outstanding int64   // tokens that gateways hold of a key that is kept by grants: the bucket may be so much fuller than its burst
	Offered     int64   // tokens that gateways may have of the same few: the debt may be so much deeper
	Bounds      *Bounds // of the level afterwards; nil for none

	consistency string // of the rule; not for the counter
}

// Level is what a bucket had at a time, in millionths of a token and µs by the counter's clock.
type Level struct{ Micros, At int64 }

// Bounds are those of a level, in millionths of a token.
type Bounds struct{ LeastMicros, MostMicros int64 }

// Plain says that nothing but the limit and uses is said of the key. Only what a plain key's full bucket would have earned meanwhile, up to
// LagMax, pays for use that one gateway tells after others have told of none.
func (f *Fold) Plain() bool {
	return !f.Grants && f.Outstanding <= 0 && f.Offered <= 0 && f.Bounds == nil && !f.Strict && f.Last == nil
}

// Lag is how long what a fold charges was in use: what was refilled meanwhile paid for it.
func (f *Fold) Lag() time.Duration {
	lag := time.Duration(0)
	for i := range f.Uses {
		lag = max(lag, f.Uses[i].Lag)
	}
	return lag
}

// makesAnew says whether the bucket that a fold left in state s began without what it had before, or without a part of it.
func (f *Fold) makesAnew(s *KeyState) bool { return s.New && f.Last == nil || s.Lost }

// Use is what one incarnation of one gateway's bucket used, merged over a batch.
type Use struct {
	Gateway     string
	Boot        string
	Incarnation uint32
	Seq         uint64        // of the newest report: a use that is not newer than the last one changes nothing
	Cum         uint64        // tokens taken in this incarnation, by that report: fewer than before if some were given back
	From        uint64        // Cum before the first of these reports: an incarnation that the counter does not know is charged from here
	Settled     uint64        // Cum of reports whose tokens have been earned again: they are counted in the total only
	DemandNanos int64         // tokens taken and refused, in billionths per second: the mean over Span; 0 leaves the gateway's demand as it is
	SureNanos   int64         // as much of it as is not chance
	Span        time.Duration // that these reports look back on
	Lag         time.Duration // the same, but of each report no more than LagMax: use may have been at the end of a long one
	Window      time.Duration // how long this demand holds: what the newest report looks back on, and a little

	// By the newest report, and not for the counter:
	Enforced Limit  // what the gateway enforced
	Tokens   int64  // that it held
	Granted  uint64 // sum of the grants that it has taken
	Sealed   time.Time
	Age      time.Duration // how long ago that was, as far as it can be told

	asked, taken uint64
	late         bool // no report says more than Cum, or they do not count as news
}

// KeyState is a key's global bucket.
type KeyState struct {
	Key         Key
	Limit       Limit
	LevelMicros int64    // millionths of a token, negative in debt
	Version     uint64   // grows with every fold, also over a loss of the counter's memory
	At          int64    // µs by the counter's clock
	Demands     []Demand // of every gateway that asked lately, in no order
	New         bool     // there was no such key before
	Lost        bool     // part of the state was missing or unreadable and has been made good
}

// Bounds of what the centre computes with. A larger limit is divided exactly, but its debt is not followed.
const (
	MaxBurst     = 2_000_000_000                 // tokens
	MaxRateNanos = 1_000_000_000 * 1_000_000_000 // a billion tokens per second
)

// LagMax bounds the Lag of one report: a bucket that is much used is reported more often than this.
const LagMax = 150 * time.Millisecond

// Timing of demand. A gateway reports a pressed key every tenth of a second: when it ceases to, its load has gone elsewhere.
const (
	demandGrace    = 50 * time.Millisecond  // a demand holds for its report's window and this …
	demandHalfLife = 100 * time.Millisecond // … then halves each time …
	demandForgets  = 20 * demandHalfLife    // … and after this it is none
	demandBlend    = 200 * time.Millisecond // a mean over this long counts as much as what was known before
	demandHoldMax  = 10 * time.Second       // of a longer window
	demandSpanMin  = 10 * time.Millisecond  // a shorter window says nothing of a rate
	demandSpanMax  = 24 * time.Hour         // a longer one says no more
	demandSpanNone = time.Second            // for a report that does not tell its window
)

// merge gathers all that a batch says of each key, in the order of first mention. Reports that arrived longer ago than late tell of no
// demand. They are counted, and charged only if the bucket was not filled again since.
func merge(items []schemas.Delivered[*schemas.Report], now time.Time, late time.Duration) []Fold {
	type reportID struct {
		gateway, boot string
		seq           uint64
	}
	var folds []Fold
	seen := make(map[reportID]bool, len(items))
	index := make(map[Key]int)
	for _, item := range items {
		r := item.Value
		id := reportID{r.Gateway, r.Boot, r.Seq}
		if seen[id] {
			continue
		}
		seen[id] = true
		for j := range r.Tokens {
			t := &r.Tokens[j]
			if !shared(t) {
				continue
			}
			key := Key{t.Rule, t.Key}
			at, ok := index[key]
			if !ok {
				at = len(folds)
				index[key] = at
				folds = append(folds, Fold{Key: key})
			}
			folds[at].add(r, t, now.Sub(item.Arrived), late)
		}
	}
	for i := range folds {
		for j := range folds[i].Uses {
			folds[i].Uses[j].finish(folds[i].Limit)
		}
	}
	return folds
}

// shared says whether t is of a bucket whose limit gateways share: enforced, and limited.
func shared(t *schemas.Tokens) bool {
	return (t.Mode == "" || t.Mode == "enforce") && t.Consistency != "local" && t.LimitRateNanos > 0 && t.LimitBurst > 0
}

func (f *Fold) add(r *schemas.Report, t *schemas.Tokens, age, late time.Duration) {
	f.Limit, f.consistency, f.Strict = Limit{t.LimitRateNanos, t.LimitBurst}, t.Consistency, t.Consistency == "strict"
	var u *Use
	for i := range f.Uses {
		if v := &f.Uses[i]; v.Gateway == r.Gateway && v.Boot == r.Boot && v.Incarnation == t.Incarnation {
			u = v
			break
		}
	}
	before := t.Cum - min(t.Taken, t.Cum)
	if u == nil {
		f.Uses = append(f.Uses, Use{Gateway: r.Gateway, Boot: r.Boot, Incarnation: t.Incarnation, From: before, late: true})
		u = &f.Uses[len(f.Uses)-1]
	}
	newest := r.Seq >= u.Seq
	if newest {
		u.Seq, u.Cum = r.Seq, t.Cum
	}
	u.From = min(u.From, before)
	if age > late {
		if age > f.Limit.fills() {
			u.Settled = max(u.Settled, t.Cum)
		}
		return
	}
	// Whatever a gateway says, and however often, these do not wrap: a report's counts are far below what they are held to here.
	u.asked, u.taken = min(u.asked+t.Taken+t.Refused, schemas.MaxCount), min(u.taken+t.Taken, schemas.MaxCount)
	if t.Window > 0 {
		u.Span = min(u.Span+min(t.Window, demandSpanMax), demandSpanMax)
		u.Lag += min(t.Window, LagMax)
	} else {
		u.Span = min(u.Span+demandSpanNone, demandSpanMax)
	}
	if newest || u.late {
		u.Window, u.Enforced = min(t.Window, demandHoldMax)+demandGrace, Limit{t.RateNanos, t.Capacity}
		u.Tokens, u.Granted, u.Sealed = t.TokensLast, t.Granted, r.SealedAt
	}
	u.late = false
}

// finish turns what was asked for into a rate. More than the whole limit is no more demand than the limit, and would only take
// longer to fade.
func (u *Use) finish(l Limit) {
	u.From = max(u.From, u.Settled)
	if u.asked > 0 {
		n, per := float64(u.asked)*1e9, max(u.Span, demandSpanMin).Seconds()
		most := float64(min(l.RateNanos, MaxRateNanos))
		u.DemandNanos = int64(min(max(n/per, 1), most))
		u.SureNanos = int64(min(max(n-2e9*math.Sqrt(float64(u.asked)), 0)/per, most)) // of requests that come at random, 98 in 100 times
	}
}

// Blend is a demand after a mean over a span of µs has come to what is left of the one before, in any unit; sure counts at once.
func Blend(was, mean, sure, micros int64) int64 {
	weight := 1 - math.Pow(0.5, float64(micros)/float64(demandBlend.Microseconds()))
	return max(int64(math.Floor(float64(was)+float64(mean-was)*weight)), sure, 1)
}

// Fade is what is left of a demand, in any unit, that ceased µs ago. Before it ceases it holds.
func Fade(demand, micros int64) int64 {
	switch {
	case micros <= 0:
		return demand
	case micros > demandForgets.Microseconds():
		return 0
	}
	return int64(float64(demand) * math.Pow(0.5, float64(micros)/float64(demandHalfLife.Microseconds())))
}
