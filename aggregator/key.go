package aggregator

import (
	"math"
	"time"

	"github.com/weirhq/weir/schemas"
)

// entry is what we remember of a key.
type entry struct {
	state       KeyState
	asked       time.Time        // when state was read
	held        map[string]*held // by gateway
	calm        time.Time        // since when every gateway may have the even share; zero while one needs another
	pressed     time.Time        // when a gateway asked for it last
	last        string           // gateway that had a token last, of those that take turns
	consistency string
	unsure      bool // the level may be wrong: what gateways hold tells
	anew        bool // the counter has made it anew, and nobody knew what it had
}

// held is one gateway's part of a key: the share that it was told, or took for itself, and the tokens that it holds.
type held struct {
	Limit
	reason string
	told   bool
	at     time.Time // when it was told

	tokens         int64 // millionths, with those that are on their way to it …
	asOf           int64 // … in µs by the counter's clock
	granted, grant uint64
	said           int64 // when it reported, in µs by the counter's clock
	unsaid         int64 // as Part.UnsaidMicros, when its share was last worked out

	next *prepared // nil for none

	wished float64 // tokens that it asked for, each second half as much of them
	served int64   // when it last said that it had used one, in µs by the counter's clock

	boot        string // of the bucket that this is about, and of its newest report
	incarnation uint32
	seq         uint64
}

// prepared is the share that was worked out for a gateway's snapshot, before it asked for one.
type prepared struct {
	Limit
	reason string
	at     time.Time
}

// holds is what the gateway may hold at now, in millionths of a token. What it has used since it reported is in it, as it is in the
// central bucket: the difference of the two is right.
func (h *held) holds(now int64) int64 {
	earned := min(float64(h.RateNanos)*float64(max(now-h.asOf, 0))/1e9, 4e15)
	return min(h.tokens+int64(earned), h.fits(h.Burst))
}

// fits is how many it may hold under a burst.
func (h *held) fits(burst int64) int64 { return saturatingAdd(saturatingMul(burst, 1e6), h.unsaid) }

// wishes is what is left at now of the tokens that the gateway asked for.
func (h *held) wishes(now int64) float64 {
	return h.wished * math.Exp2(-float64(max(now-h.said, 0))/1e6)
}

// used is what the gateway has probably used at now since it reported, by a demand of so many billionths of a token per second.
func (h *held) used(demandNanos, now int64) int64 {
	return int64(min(float64(demandNanos)*float64(max(now-h.said, 0))/1e9, 4e15))
}

// ready says whether a share is prepared and still good.
func (h *held) ready(now time.Time) bool { return h.next != nil && now.Sub(h.next.at) <= liveHolds }

// note takes what a gateway says of its bucket.
func (e *entry) note(u *Use, at int64) {
	h := e.held[u.Gateway]
	if u.late || h != nil && h.boot == u.Boot && u.Seq <= h.seq {
		return
	}
	if h == nil || h.boot != u.Boot || h.incarnation != u.Incarnation || u.Granted < h.granted {
		h = &held{Limit: u.Enforced, boot: u.Boot, incarnation: u.Incarnation} // a bucket that we do not know
		e.held[u.Gateway] = h
	}
	h.wished = h.wishes(at) + float64(u.asked)
	if u.taken > 0 {
		h.served = at
	}
	h.seq, h.granted, h.grant = u.Seq, u.Granted, max(h.grant, u.Granted)
	h.said = at - u.Age.Microseconds()
	h.tokens, h.asOf = 1e6*(min(max(u.Tokens, 0), MaxBurst)+int64(min(h.grant-h.granted, MaxBurst))), h.said
	h.unsaid = 0
}

// hear takes what gateways say of a key in a batch.
func (e *entry) hear(f *Fold, s *KeyState) {
	if len(f.Uses) > 0 {
		e.consistency = f.consistency
	}
	for i := range f.Uses {
		e.note(&f.Uses[i], s.At)
	}
}

// reckon works out what gateways have used of the key that is still in its bucket. A bucket that is full lost what it could not take:
// what was used meanwhile it will not lack.
func (e *entry) reckon(s *KeyState) {
	for _, h := range e.held {
		h.unsaid = 0
	}
	sum := 0.0
	for _, d := range s.Demands {
		if h := e.held[d.Gateway]; h != nil {
			h.unsaid = h.used(d.RateNanos, s.At)
			sum += float64(h.unsaid)
		}
	}
	if room := float64(max(saturatingMul(s.Limit.Burst, 1e6)-s.LevelMicros, 0)); sum > room {
		for _, h := range e.held {
			h.unsaid = int64(float64(h.unsaid) * (room / sum))
		}
	}
}

// evenShare is what a gateway takes for itself of a limit, as long as it was told no share.
func evenShare(l Limit, gateways int) Limit {
	return Limit{l.RateNanos / int64(gateways), max(l.Burst/int64(gateways), 1)}
}

// part is gateway's part of the key in the even case or as we know it.
func (e *entry) part(gateway string, even Limit, now int64) *held {
	if h := e.held[gateway]; h != nil {
		return h
	}
	return &held{Limit: even, tokens: saturatingMul(even.Burst, 1e6), asOf: now, said: now}
}

// byGrants says whether a key is kept by grants alone: its tokens are too few for rates and bursts, or are not to be given twice.
func byGrants(consistency string, l Limit, gateways int) bool {
	return consistency == "lease" || schemas.TooFew(l.Burst, gateways)
}

func (e *entry) byGrants(l Limit, gateways int) bool { return byGrants(e.consistency, l, gateways) }

// byOffers says whether the key's tokens are so few and seldom that they are offered.
func byOffers(l Limit, gateways int) bool {
	return gateways > 1 && schemas.TooFew(l.Burst, gateways) && l.slow()
}

// tell notes that a gateway is told a share. mu is held.
func (e *entry) tell(s *KeyState, sh *Share, reason string, gateways int, now time.Time) *held {
	h := *e.part(sh.Gateway, evenShare(s.Limit, gateways), s.At)
	h.tokens = min(h.holds(s.At), h.fits(sh.Burst)) + 1e6*sh.Grant
	h.Limit, h.asOf = Limit{sh.RateNanos, sh.Burst}, s.At
	h.next = nil
	h.reason, h.told, h.at, h.grant = reason, true, now, h.grant+uint64(sh.Grant)
	e.held[sh.Gateway] = &h
	return &h
}

// remember makes an entry for a key. When there are too many another is forgotten, which costs a message at most: gateways say
// in their reports what they enforce. mu is held.
func (a *Aggregator) remember(s *KeyState, asked time.Time) *entry {
	a.trim(1)
	e := &entry{state: *s, asked: asked, held: make(map[string]*held)}
	a.keys[s.Key] = e
	return e
}

// trim forgets keys until there is room for some more. mu is held.
func (a *Aggregator) trim(more int) {
	most := max(min(a.cfg.MaxKeys, a.cfg.MaxShares/max(len(a.fleet), 1)), 1)
	for key := range a.keys {
		if len(a.keys)+more <= most {
			return
		}
		delete(a.keys, key)
	}
}

// pressed says whether gateways ask for the whole limit, or have spent more.
func (s *KeyState) pressed() bool {
	var sum int64
	for _, d := range s.Demands {
		if sum += d.RateNanos; sum >= s.Limit.RateNanos || sum < 0 {
			return true
		}
	}
	return s.LevelMicros < 0
}

func (s *KeyState) share(h *held) schemas.Share {
	level := s.LevelMicros / 1e6
	if s.LevelMicros%1e6 < 0 {
		level-- // any debt shows
	}
	return schemas.Share{Rule: s.Key.Rule, Key: s.Key.Key, Version: s.Version, RateNanos: h.RateNanos, Burst: h.Burst,
		LimitRateNanos: s.Limit.RateNanos, LimitBurst: s.Limit.Burst, Reason: h.reason, Level: level,
		Granted: h.granted, Grant: h.grant}
}
