package schemas

import "time"

// ThrottleUpdate says what part of each limit one gateway may spend. Every message, even an empty one, renews the
// time to live of the shares that the gateway holds.
type ThrottleUpdate struct {
	Gateways int           // gateways alive, the receiver included: the divisor for keys without a share
	TTL      time.Duration // how long shares hold without another message from the centre
	Snapshot bool          // every live share of the gateway, in answer to a request
	Epoch    uint64        // of the centre: gateways ignore an update of an older one than the last they saw; 0 is of none
	Frozen   bool          // the centre has no store, or no reports reach it, and it makes no grants now: a share that lives by them (one without a rate) holds no longer, others do
	Weight   int           // millionths of each limit that the gateway keeps to when it hears the centre no longer; 0 is one part in Gateways
	Shares   []Share
}

// WholeWeight is the sum of a fleet's weights: all of each limit.
const WholeWeight = 1_000_000

// EvenWeight is the weight of each of so many gateways, where nothing else is known of them.
func EvenWeight(gateways int) int { return max(WholeWeight/max(gateways, 1), 1) }

// Share is a gateway's part of one key's limit. Versions of a key only grow, also over a restart of the centre:
// an older or equal version is ignored, so that late, repeated and reordered updates are harmless.
type Share struct {
	Rule, Key      string
	Version        uint64
	RateNanos      int64 // billionths of a token per second
	Burst          int64
	LimitRateNanos int64 // the whole limit that this share was cut from
	LimitBurst     int64
	Reason         string // demand, debt or newcomer
	Level          int64  // tokens in the central bucket, negative in debt

	// Tokens that move to this gateway, as sums over the life of its bucket: it takes the difference between Grant and what it
	// has taken so far, once, so that updates may be repeated, lost and reordered. A bucket that has taken less than Granted
	// is another one than the centre knew, and takes nothing.
	Granted, Grant uint64
}

// ModeStopped is Heartbeat.Mode in the last one of a gateway that is shut down.
const ModeStopped = "stopped"

// WithoutSpool is in Heartbeat.Without while the gateway cannot keep usage on disk as it should.
const WithoutSpool = "spool"

// Heartbeat is a gateway's sign of life.
type Heartbeat struct {
	Gateway        string // from the subject
	Boot           string
	SentAt         time.Time
	PolicyVersion  uint64
	Mode           string        // synced, stale, isolated, floor, local or ModeStopped
	ClockOffset    time.Duration // the centre's clock less the gateway's, round trip taken out
	ClockError     time.Duration // the offset is within this
	ClockKnown     bool
	PendingReports uint64   // sealed and not yet acknowledged
	Version        string   // of weir
	Without        []string // what it does without: WithoutSpool
	Sealed         uint64   // number of the newest report with requests that this boot has sealed; 0 when there is none, or it does not say
	Weight         int      // millionths of each limit that it keeps to without the centre; 0 when it does not say
}

// ClockReply carries the two middle timestamps of a clock measurement, by the centre's clock.
type ClockReply struct{ Received, Sent time.Time }

// TakeRequest asks the centre for tokens of a key whose limit is kept strictly.
type TakeRequest struct {
	Rule, Key      string
	LimitRateNanos int64
	LimitBurst     int64
	Cost           int64 // tokens, not 0: below, tokens are given back

	Gateway string // that asks; it is in the subject, and not on the wire
}

// TakeReply answers a TakeRequest.
type TakeReply struct {
	Allowed   bool
	Remaining int64         // tokens left in the central bucket
	RetryIn   time.Duration // 0 when allowed; else the shortest wait after which the same would be allowed
}

// TooFew says whether a limit of this burst is too small to be cut into rates and bursts for so many gateways, so that its tokens move
// by grants alone. The last one to ask may hold a token of it for long. The centre and the gateways go by it.
func TooFew(burst int64, gateways int) bool { return burst < 2*int64(gateways) }
