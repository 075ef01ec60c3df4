package aggregator

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
	"strings"
	"time"
)

// Limit is what all gateways together may spend of one key.
type Limit struct {
	RateNanos int64 // billionths of a token per second
	Burst     int64 // tokens
}

// Demand is what one gateway asks for.
type Demand struct {
	Gateway   string
	RateNanos int64 // tokens taken and refused, in billionths per second; 0 asks for nothing
	Since     int64 // when it began to ask without a pause, in µs by the counter's clock; 0 when it asks for nothing
}

// Share is one gateway's part of a limit.
type Share struct {
	Gateway   string
	RateNanos int64
	Burst     int64
	Grant     int64 // tokens that move to it now, from what nobody holds
}

// Part is what the centre knows of one gateway: what it asks for and what it holds.
type Part struct {
	Demand
	HeldMicros   int64 // millionths of a token that it holds, with what is on its way to it, as far as it has said
	UsedMicros   int64 // of these it has probably used since then
	UnsaidMicros int64 // as much of that as the central bucket will lack when it reports: until then it holds so many beyond its burst
}

// left is what a gateway has probably not used yet, in millionths of a token.
func (p *Part) left() int64 { return max(p.HeldMicros-max(p.UsedMicros, 0), 0) }

const (
	// floorPart: an even share divided by this is kept for each gateway, so that one that asks for nothing can start at once.
	// It is what the others cannot use, at most 1.6 % of a limit.
	floorPart = 64

	// skimTo: who has enough beside others that lack tokens keeps as many as last for this, so that chance refuses it few.
	skimTo = 100 * time.Millisecond

	// debtSeconds is the time constant in which debt is repaid: 92 % in five seconds.
	debtSeconds = 2
	// debtFloor: the rate of a limit in debt never falls below this part of it.
	debtFloor = 8
)

// fills is how long an empty bucket takes to be full: what was taken longer ago has been earned again.
func (l Limit) fills() time.Duration {
	seconds := float64(l.Burst) * 1e9 / float64(max(l.RateNanos, 1))
	return time.Duration(min(seconds*1e9, math.MaxInt64/2))
}

// Repaying is the limit to divide while debt (in millionths of a token) is repaid: a lower rate, never zero, and the same burst.
func (l Limit) Repaying(debtMicros int64) Limit {
	if debtMicros <= 0 || l.RateNanos <= 0 {
		return l
	}
	floor := max(l.RateNanos/debtFloor, 1)
	cut := saturatingMul(debtMicros, 1000/debtSeconds) // µtokens over seconds, in nanotokens per second
	return Limit{RateNanos: max(l.RateNanos-min(cut, l.RateNanos), floor), Burst: l.Burst}
}

// Divide divides a key between gateways: rates as Allocate does, and bursts, too, while nobody lacks tokens. Those that gateways hold
// are a partition of the central bucket: what they hold is cut to their shares, and what the bucket then has beyond that is free, and
// moves to those that ask. When gateways hold more than the bucket has, its limit is divided at a lower rate until they do not.
//
// Shares come sorted by gateway and depend on nothing but the arguments. Differences below a slack move no tokens, so that the noise
// of measurements does not.
func Divide(l Limit, levelMicros int64, parts []Part) []Share {
	parts = slices.Clone(parts)
	slices.SortFunc(parts, func(a, b Part) int { return strings.Compare(a.Gateway, b.Gateway) })
	demands := make([]Demand, len(parts))
	for i := range parts {
		demands[i] = parts[i].Demand
	}
	shares := Allocate(l, demands)
	l.skim(shares, parts, levelMicros)
	free := levelMicros
	for i := range parts {
		free -= parts[i].kept(&shares[i])
	}
	slack := l.slackMicros()
	if free < -slack {
		for i, s := range Allocate(l.Repaying(-free-slack), demands) {
			shares[i].RateNanos = s.RateNanos
		}
	}
	if free < slack {
		return shares
	}
	rooms := make([]int64, len(parts)) // whole tokens that fit
	var sum int64
	for i := range parts {
		if parts[i].RateNanos > 0 {
			rooms[i] = max(shares[i].Burst-(parts[i].kept(&shares[i])+999_999)/1e6, 0)
			sum += rooms[i]
		}
	}
	left := min(free/1e6, sum)
	for i := range rooms {
		if rooms[i] > 0 {
			shares[i].Grant = mulDiv(left, rooms[i], sum)
			left -= shares[i].Grant
			sum -= rooms[i]
		}
	}
	return shares
}

// skim takes the room for tokens from gateways that have enough and gives it to those that lack some: what lies here is refused there.
// Who has enough keeps room for its part of what there is, and never for less than lasts for skimTo. Where nobody lacks any it does nothing.
func (l Limit) skim(shares []Share, parts []Part, levelMicros int64) {
	level := coarse(max(levelMicros, 0) / 1e6)
	enough := func(i int) int64 {
		rate := shares[i].RateNanos
		return 1 + max(mulDiv(rate, skimTo.Milliseconds(), 1000)/1e9, mulDiv(min(level, l.Burst), rate, l.RateNanos))
	}
	lacks := func(i int) bool {
		return parts[i].RateNanos > shares[i].RateNanos && parts[i].left() <= saturatingMul(enough(i), 1e6)
	}
	lacking, room := int64(0), int64(0) // billionths of a token per second that those have who lack some, and tokens
	for i := range parts {
		if lacks(i) {
			lacking += shares[i].RateNanos
		}
	}
	if lacking == 0 {
		return
	}
	for i := range parts {
		if s := &shares[i]; parts[i].RateNanos > 0 && !lacks(i) && s.Burst > enough(i) {
			room += s.Burst - enough(i)
			s.Burst = enough(i)
		}
	}
	for i := range parts {
		if s := &shares[i]; lacks(i) {
			n := mulDiv(room, s.RateNanos, lacking)
			s.Burst += n
			room -= n
			lacking -= s.RateNanos
		}
	}
}

// kept is what a gateway still holds under its next share, in millionths of a token.
func (p *Part) kept(s *Share) int64 {
	return min(max(p.HeldMicros, 0), saturatingAdd(saturatingMul(s.Burst, 1e6), p.UnsaidMicros))
}

// slackMicros is how far what gateways hold and what the bucket has may be apart before tokens move: five milliseconds'
// worth, which is less than the time between two reports, and a token at least.
func (l Limit) slackMicros() int64 { return max(l.RateNanos/1e3/200, 1e6) }

// Granting is what Grant gives, and whose turn is next.
type Granting struct {
	Shares []Share
	Last   string // gateway that had tokens last
	Wants  int64  // millionths of a token that must be free before the next are given; 0 when nobody needs any
	Free   int64  // that are free
}

// grantsPerSecond bounds how often tokens of a key that has too few are handed out: each time to the gateway that needs them most,
// so that a key costs so many messages however many gateways are in need.
const grantsPerSecond = 60

// Grant divides a key by grants alone: nobody refills by itself, and whole tokens that are free move to gateways that run out of
// them, as many as last for the time given. It is for limits too small to be cut into rates, and for those that are to be kept
// to the token. While more is asked for than there is, who asks for less than an even part has half as many. When there are too few, who asks for nothing gives back what it holds, and the others are to run dry at the same
// time under the max-min fair division of the rate: who does so first is the first to have more, and of those that are dry the
// one that comes after the last gateway that had some.
func Grant(l Limit, levelMicros int64, parts []Part, lasting time.Duration, last string) Granting {
	parts = slices.Clone(parts)
	slices.SortFunc(parts, func(a, b Part) int { return strings.Compare(a.Gateway, b.Gateway) })
	g := Granting{Shares: make([]Share, len(parts)), Last: last, Free: levelMicros}
	var hungry []hunger
	idle, lack := int64(0), int64(0)
	wanted := 0.0
	for i := range parts {
		wanted += float64(max(parts[i].RateNanos, 0))
	}
	for i := range parts {
		p, s := &parts[i], &g.Shares[i]
		s.Gateway, s.Burst = p.Gateway, (max(p.HeldMicros, 0)+999_999)/1e6
		if p.RateNanos > 0 {
			lasts, low := lasting, int64(3) // quarters of a block: the rest lasts for longer than a centre that is gone is waited for
			if wanted > float64(l.RateNanos) && p.RateNanos < l.RateNanos/int64(len(parts)) {
				lasts, low = lasting/2, 2 // what lies here is refused elsewhere
			}
			block := min(max(mulDiv(min(p.RateNanos, l.RateNanos), lasts.Milliseconds(), 1000)/1e9, 1), max(l.Burst, 1))
			s.Burst = max(block, min((p.HeldMicros+999_999)/1e6, 2*block))
			if need := block - p.HeldMicros/1e6; need > 0 && p.left() <= block*1e6/4*low {
				hungry = append(hungry, hunger{part: i, need: need, left: p.left(), share: need})
				lack += need
			}
		} else {
			idle += p.kept(s)
		}
		g.Free -= p.kept(s)
	}
	if g.Free < saturatingMul(lack, 1e6) && idle > 0 { // who asks for nothing keeps what it holds as long as nobody needs it
		for i := range parts {
			if parts[i].RateNanos <= 0 {
				g.Shares[i].Burst = 0
			}
		}
		g.Free += idle
	}
	turn := max(l.RateNanos/1e9/grantsPerSecond, 1)
	if lack > 0 && g.Free >= 1e6*min(lack, turn) {
		if g.Free < saturatingMul(lack, 1e6) {
			l.queue(hungry, parts, g.Free, last)
		}
		for _, h := range hungry {
			n := min(h.need, g.Free/1e6, max(h.share, turn))
			if n < min(h.need, turn) {
				break // a little for everybody is a message for everybody
			}
			g.Shares[h.part].Grant, g.Last = n, parts[h.part].Gateway
			g.Free -= 1e6 * n
			lack -= n
		}
	}
	g.Wants = 1e6 * min(lack, turn)
	return g
}

// hunger is a gateway in need of tokens.
type hunger struct {
	part  int   // index
	need  int64 // tokens
	left  int64 // millionths of a token that it has not used yet, probably
	rate  int64 // its part of the limit, in billionths of a token per second
	dry   int64 // µs until it has none left at that rate
	share int64 // tokens that it should have now: all, or of too few its part
}

// queue orders gateways by when they will be dry, and sets what each should have of too few tokens for all to be dry together.
func (l Limit) queue(hungry []hunger, parts []Part, freeMicros int64, last string) {
	demands := make([]Demand, len(parts))
	for i := range parts {
		demands[i] = parts[i].Demand
	}
	fair := Allocate(Limit{l.RateNanos, int64(len(parts))}, demands)
	for i := range hungry {
		h := &hungry[i]
		h.rate = max(fair[h.part].RateNanos, 1)
		h.dry = int64(float64(h.left) / float64(h.rate) * 1e9)
	}
	slices.SortStableFunc(hungry, func(a, b hunger) int {
		if a.dry != b.dry {
			return cmp.Compare(a.dry, b.dry)
		}
		after := func(h hunger) int {
			if parts[h.part].Gateway > last {
				return 0
			}
			return 1
		}
		return cmp.Compare(after(a), after(b))
	})
	// water filling: the first n reach the same time
	have, rate, until := float64(freeMicros), 0.0, 0.0
	for i := range hungry {
		if h := &hungry[i]; rate == 0 || float64(h.dry) < (have/rate)*1e9 {
			have += float64(h.left)
			rate += float64(h.rate)
			until = have / rate * 1e9
		}
	}
	for i := range hungry {
		h := &hungry[i]
		h.share = int64(max(until*float64(h.rate)/1e9-float64(h.left), 0)) / 1e6
	}
}

// Bounds of offers.
const (
	offerSlow  = 2_000_000_000         // billionths of a token per second: a limit that earns no more than this is offered
	offerReach = 50 * time.Millisecond // an offer is withdrawn within this after a token was used
	offerRisk  = 0.3                   // tokens used beyond those that there are, each time, at most
	offerHeavy = 32                    // a gateway that asks so many times while a token is earned takes its turn
	offerDebt  = 10                    // tokens used beyond those that there are that are repaid: more would close a key for too long
)

// slow says whether tokens of a limit come so seldom that they are offered.
func (l Limit) slow() bool { return l.RateNanos > 0 && l.RateNanos <= offerSlow }

// Wish is what one gateway wants of a key whose tokens are offered, and what it has of them.
type Wish struct {
	Gateway    string
	PerSecond  float64 // tokens that it asked for lately
	Served     int64   // when it used one last, in µs by the counter's clock
	HeldMicros int64   // millionths of a token that it holds
}

// Offer divides a key of which a token comes so seldom that nobody can tell who will ask for the next one: it is offered to many, and
// withdrawn from the others as soon as one has used it. Two that use it within a round trip leave a debt, which is repaid
// before another is offered; so many gateways hold an offer as make that improbable. Of those that ask all the time one has it, the one that
// was not served for the longest.
//
// Whole tokens are divided evenly between those that hold an offer, one each at least.
func Offer(l Limit, levelMicros int64, wishes []Wish) Granting {
	wishes = slices.Clone(wishes)
	slices.SortFunc(wishes, func(a, b Wish) int { return strings.Compare(a.Gateway, b.Gateway) })
	g := Granting{Shares: make([]Share, len(wishes)), Free: levelMicros}
	for i := range wishes {
		g.Shares[i].Gateway = wishes[i].Gateway
	}
	if levelMicros < 1e6 {
		g.Wants = 1e6
		return g
	}
	offered := l.offered(wishes)
	each := max(levelMicros/1e6/int64(len(offered)), 1)
	for _, i := range offered {
		s := &g.Shares[i]
		s.Burst = each
		s.Grant = max(each-max(wishes[i].HeldMicros, 0)/1e6, 0)
	}
	return g
}

// offered are the gateways, by index, that a token is offered to.
func (l Limit) offered(wishes []Wish) []int {
	perToken := 1e9 / float64(l.RateNanos) // seconds
	order := make([]int, len(wishes))
	for i := range order {
		order[i] = i
	}
	heavy := func(i int) bool { return wishes[i].PerSecond*perToken >= offerHeavy }
	has := func(i int) bool { return wishes[i].HeldMicros >= 1e6 }
	slices.SortStableFunc(order, func(a, b int) int { // whose turn it is, then by what they ask for: first who would use it soon
		switch {
		case heavy(a) != heavy(b):
			return before(heavy(a))
		case has(a) != has(b): // an offer stays where it is
			return before(has(a))
		case heavy(a) || (wishes[a].PerSecond > 0) == (wishes[b].PerSecond > 0):
			return cmp.Compare(wishes[a].Served, wishes[b].Served)
		}
		return before(wishes[a].PerSecond > 0)
	})
	most := max(int(grantsPerSecond*perToken), 1)
	offered, risk := order[:0:0], 0.0
	for n, i := range order {
		if n > 0 {
			if risk += wishes[i].PerSecond * offerReach.Seconds(); risk > offerRisk {
				risk -= wishes[i].PerSecond * offerReach.Seconds()
				continue
			}
		}
		if offered = append(offered, i); len(offered) == most {
			break
		}
	}
	return offered
}

func before(yes bool) int {
	if yes {
		return -1
	}
	return 1
}

// Allocate divides l between gateways. Shares add up to l exactly, come sorted by gateway, and depend on nothing but the
// arguments (not on the order of demands).
//
// Rate: when every demand fits with half to spare, each gateway gets one and a half times its demand and what is left lifts
// the lowest shares to one level, which is the even split when all ask for little. When the demands just fit, they are
// stretched to the whole limit. When they do not fit, the division is max-min fair: nobody gets more than it asks for while
// another lacks. In all three no share falls below 1/64 of the even one.
//
// Burst follows the rate, at least 1 each. A burst smaller than the number of gateways goes, 1 each, to those that asked first,
// then to gateways that ask for nothing, by name; the rest get neither burst nor rate. Nanotokens that do not divide go to the
// hungriest gateways.
//
// A gateway may appear once only; a negative demand is none.
func Allocate(l Limit, demands []Demand) []Share {
	if len(demands) == 0 {
		return nil
	}
	d := slices.Clone(demands)
	slices.SortFunc(d, func(a, b Demand) int { return strings.Compare(a.Gateway, b.Gateway) })
	l.RateNanos, l.Burst = max(l.RateNanos, 0), max(l.Burst, 0)
	shares := make([]Share, len(d))
	for i := range d {
		d[i].RateNanos = max(d[i].RateNanos, 0)
		shares[i].Gateway = d[i].Gateway
	}

	// who takes part: every gateway, or as many as there are tokens of burst
	part := make([]int, len(d)) // indexes into d and shares
	for i := range part {
		part[i] = i
	}
	if n := int(min(l.Burst, int64(len(d)))); n < len(d) && l.Burst > 0 {
		slices.SortStableFunc(part, func(i, j int) int { return askedFirst(d[i], d[j]) })
		part = part[:n]
	}
	slices.SortStableFunc(part, func(i, j int) int { return hungrier(d[i], d[j]) })

	divideRate(l.RateNanos, d, part, shares)
	divideBurst(l, part, shares)
	return shares
}

// askedFirst orders gateways that ask before those that do not, the longest asking first.
func askedFirst(a, b Demand) int {
	switch {
	case a.RateNanos > 0 && b.RateNanos > 0:
		return cmp.Compare(a.Since, b.Since)
	case a.RateNanos > 0:
		return -1
	case b.RateNanos > 0:
		return 1
	}
	return 0
}

func hungrier(a, b Demand) int { return cmp.Compare(b.RateNanos, a.RateNanos) }

// divideRate gives every member of part, the hungriest first, its rate.
func divideRate(rate int64, d []Demand, part []int, shares []Share) {
	n := int64(len(part))
	floor := rate / (n * floorPart)
	want := func(i int) int64 { return min(max(d[i].RateNanos, floor), rate) }
	roomy := func(i int) int64 {
		if half := d[i].RateNanos / 2; d[i].RateNanos < rate-half { // else one and a half are more than any share
			return min(max(d[i].RateNanos+half, floor), rate)
		}
		return rate
	}

	left := rate
	if sum, fits := total(part, roomy, rate); fits && sum <= rate {
		for k, i := range part { // from the top: the first that wants less than the mean of what is left sets the level
			share := min(max(roomy(i), (left-1)/(n-int64(k))+1), left)
			shares[i].RateNanos = share
			left -= share
		}
	} else if sum, fits := total(part, want, rate); fits {
		for _, i := range part {
			shares[i].RateNanos = mulDiv(want(i), rate, sum)
			left -= shares[i].RateNanos
		}
	} else {
		for k := range part { // from the bottom: who wants less than the mean gets it
			i := part[len(part)-1-k]
			share := min(want(i), left/(n-int64(k)))
			shares[i].RateNanos = share
			left -= share
		}
	}
	shares[part[0]].RateNanos += left // what did not divide
}

// total adds up f over part, or reports false when that exceeds bound.
func total(part []int, f func(int) int64, bound int64) (sum int64, fits bool) {
	for _, i := range part {
		v := f(i)
		if v > bound-sum {
			return 0, false
		}
		sum += v
	}
	return sum, true
}

// divideBurst gives every member of part 1 and its part of the rest. Tokens that do not divide go to the largest remainders, in
// steps too coarse for the noise of a demand to move a token.
func divideBurst(l Limit, part []int, shares []Share) {
	base := int64(0)
	if l.Burst >= int64(len(part)) {
		base = 1
	}
	rest := l.Burst - base*int64(len(part))
	left := rest
	remainder := make([]int64, len(shares))
	for _, i := range part {
		share, of := shares[i].RateNanos, l.RateNanos
		if of == 0 {
			share, of = 1, int64(len(part))
		}
		whole := mulDiv(rest, share, of)
		hi, lo := bits.Mul64(uint64(rest), uint64(share))
		remainder[i] = (int64(bits.Rem64(hi, lo, uint64(of)))/(of/256+1) + 1) / 2
		shares[i].Burst = base + whole
		left -= whole
	}
	slices.Sort(part)
	slices.SortStableFunc(part, func(i, j int) int { return cmp.Compare(remainder[j], remainder[i]) })
	for k := range left { // fewer than len(part)
		shares[part[k]].Burst++
	}
}

// mulDiv is floor(a·b/c) for 0 <= a, b; it must not exceed a or b, and c > 0. A zero c gives 0.
func mulDiv(a, b, c int64) int64 {
	if c <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	q, _ := bits.Div64(hi, lo, uint64(c))
	return int64(q)
}

func saturatingMul(a, b int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	if hi > 0 || lo > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(lo)
}

func saturatingAdd(a, b int64) int64 {
	if b > math.MaxInt64-a {
		return math.MaxInt64
	}
	return a + b
}
