// Package ingest gathers what a gateway decided into usage reports and sees to it that each is stored exactly once.
package ingest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weirhq/weir/schemas"
)

// Config says how usage gathers into reports. A zero field means its default.
type Config struct {
	HotEvery       time.Duration // hot buckets are reported this often (100ms)
	HotMin         time.Duration // and at once when one asks for it, but no sooner than this after the last time (10ms)
	UsageEvery     time.Duration // requests are reported this often (1s)
	AllEvery       time.Duration // all touched buckets are reported this often (2s)
	MaxEntries     int           // of one report (500)
	MaxBytes       int           // of one encoded report, and below the server's max_payload (512 KiB)
	MaxReports     int           // sealed and not in the stream; past it buckets, and without a Spool counts, add up where they are (64)
	MaxRejections  int           // samples in each UsageEvery (20)
	PublishTimeout time.Duration // of one attempt (2s); the first ones of a report get less, see hastyMin
	RetryMin       time.Duration // wait after a failed attempt, doubling (50ms)
	RetryMax       time.Duration // up to this (2s)
	DrainTimeout   time.Duration // for what is left when Run is told to stop (8s), or less, see Left
	LogEvery       time.Duration // while publishing fails it is told once, then summarised this often (1m)

	Spool         Spool                // where counts and reports wait (in memory); one that outlives the process needs a Publisher that is a Stream
	MaxPayload    func() int64         // of a message, as the server said last; 0 while it is not known (0). It must not wait
	Left          func() time.Duration // asked when Run is told to stop: what there is for draining at most (DrainTimeout)
	PolicyVersion func() uint64        // in force now, stamped on every report (0)
	Clock         func() int64         // the buckets' clock, in nanoseconds, handed to Collect (time since New)
}

func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	num := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	def(&c.HotEvery, 100*time.Millisecond)
	def(&c.HotMin, 10*time.Millisecond)
	def(&c.UsageEvery, time.Second)
	def(&c.AllEvery, 2*time.Second)
	num(&c.MaxEntries, 500)
	num(&c.MaxBytes, 512<<10)
	num(&c.MaxReports, 64)
	num(&c.MaxRejections, 20)
	def(&c.PublishTimeout, 2*time.Second)
	def(&c.RetryMin, 50*time.Millisecond)
	def(&c.RetryMax, 2*time.Second)
	def(&c.DrainTimeout, 8*time.Second)
	def(&c.LogEvery, time.Minute)
	if c.Left == nil {
		c.Left = func() time.Duration { return c.DrainTimeout }
	}
	if c.PolicyVersion == nil {
		c.PolicyVersion = func() uint64 { return 0 }
	}
	if c.MaxPayload == nil {
		c.MaxPayload = func() int64 { return 0 }
	}
	if c.Clock == nil {
		start := time.Now()
		c.Clock = func() int64 { return int64(time.Since(start)) }
	}
	return c
}

// Buckets are the gateway's token buckets.
type Buckets interface {
	// Collect emits one record for each bucket touched since its last record: only hot ones, or all. now is by
	// Config.Clock. emit keeps no reference to what it is given and must not call back into the buckets.
	Collect(now int64, all bool, emit func(schemas.Tokens))
	// Hot is signalled when a bucket should be reported at once.
	Hot() <-chan struct{}
}

// Publisher stores reports. It is called by one goroutine.
type Publisher interface {
	// Publish returns nil once r is stored exactly once, however often it was tried before. After an error, the
	// outcome may be unknown: it is called again with the same r until it returns nil. It returns soon after ctx is done.
	Publish(ctx context.Context, r *schemas.Report) error
}

// Metrics are shared by all reporters of a process.
type Metrics struct {
	Admitted prometheus.Counter // weir_usage_units_total{stage="admitted"}: requests gathered
	Spooled  prometheus.Counter // …{stage="spooled"}: requests in sealed reports
	Acked    prometheus.Counter // …{stage="acked"}: requests in stored reports
	Degraded prometheus.Gauge   // raised by one while reports cannot be stored

	Failures   prometheus.Counter     // attempts to store a report that failed
	Reports    prometheus.Gauge       // sealed and not yet stored
	Merged     prometheus.Gauge       // entries that wait in memory for room to be sealed
	Again      prometheus.Counter     // reports that are sent again, for the stream may have lost them
	Confirms   *prometheus.CounterVec // result: ok, failed
	Rejections *prometheus.CounterVec // result: kept, dropped
	Seconds    prometheus.Histogram   // from seal to stored
}

// NewMetrics registers the metrics with reg. Admitted, Spooled, Acked and Degraded are private until the wiring puts
// the shared ones there.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	stage := func(s string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_usage_units_total", ConstLabels: prometheus.Labels{"stage": s}})
	}
	m := &Metrics{
		Admitted: stage("admitted"), Spooled: stage("spooled"), Acked: stage("acked"),
		Degraded: prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_degraded", ConstLabels: prometheus.Labels{"part": "ingest"}}),
		Failures: prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_ingest_publish_failures_total", Help: "Attempts to store a usage report that failed. The report is tried again."}),
		Reports:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_ingest_pending_reports", Help: "Usage reports sealed and not yet stored."}),
		Merged:   prometheus.NewGauge(prometheus.GaugeOpts{Name: "weir_ingest_merged_entries", Help: "Usage and bucket entries that merge in memory because too many reports wait."}),
		Again:    prometheus.NewCounter(prometheus.CounterOpts{Name: "weir_ingest_sent_again_total", Help: "Usage reports that the stream had taken, that are not in the history, and that are sent again."}),
		Confirms: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_ingest_confirmations_total", Help: "Questions to the history about what it has."}, []string{"result"}),
		Rejections: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "weir_ingest_rejection_samples_total",
			Help: "Sampled rejections, kept or dropped. Every rejection is counted in the usage either way."}, []string{"result"}),
		Seconds: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "weir_ingest_store_seconds", Help: "Time from the seal of a usage report until it is stored.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, 1, 5, 30, 300, 3600}}),
	}
	for _, r := range []string{"kept", "dropped"} {
		m.Rejections.WithLabelValues(r)
	}
	reg.MustRegister(m.Failures, m.Reports, m.Merged, m.Again, m.Confirms, m.Rejections, m.Seconds)
	return m
}

// Reporter gathers, seals and sends the usage of one gateway. Count and Reject may be called from any goroutine.
//
// Nothing is ever dropped but samples of rejections. While the spool is full, counts merge per (tenant, route, rule,
// layer, hour). An entry then costs about 400 bytes besides its text (TestOutageMemoryIsBounded measures it), so an outage
// of h hours over k live (tenant, route, outcome) takes 400·k·h bytes: 4 MB an hour for 10,000 tenants. A spool on disk
// takes reports until it is full, and memory does not grow before. Buckets are not asked while MaxReports wait: they add
// up what they gave.
type Reporter struct {
	cfg     Config
	gateway string
	boot    string
	buckets Buckets
	stream  Stream
	log     *slog.Logger
	m       *Metrics

	counts  counts
	samples samples
	spool   Spool
	sealed  atomic.Uint64 // requests that the spool has taken
	newest  atomic.Uint64 // report with requests that the spool has taken
	shrunk  chan struct{} // signalled when the spool has shrunk
	lastErr atomic.Pointer[error]

	// Run's own.
	pending    pending
	generation uint32 // that requests are counted in
	gathered   uint64 // requests, up to the last drain
	told       uint64 // of them, in Metrics.Admitted
	seq        uint64
	usageAt    time.Time // last flush of each kind
	allAt      time.Time
	flushedAt  time.Time
	wasMerging int
	late       bool // a flush waits for the spool; Run's alone
	full       bool // the spool was, at the last seal
}

// New returns a reporter for one life of a gateway. boot must be a valid name that nobody can guess and that was
// never used before (128 random bits). m may be nil.
func New(cfg Config, gateway, boot string, buckets Buckets, pub Publisher, log *slog.Logger, m *Metrics) *Reporter {
	if m == nil {
		m = NewMetrics(prometheus.NewRegistry())
	}
	cfg = cfg.withDefaults()
	r := &Reporter{cfg: cfg, gateway: gateway, boot: boot, buckets: buckets, log: log.With("gateway", gateway), m: m,
		spool: cfg.Spool, shrunk: make(chan struct{}, 1), pending: newPending(), generation: 1}
	var ok bool
	if r.stream, ok = pub.(Stream); !ok {
		r.stream = direct{pub}
	}
	if r.spool == nil {
		r.spool = newMemory(cfg.MaxReports)
	}
	r.seq = r.spool.Seq()
	r.newest.Store(r.seq)
	reports, _ := r.spool.Len() // of earlier lives
	m.Reports.Add(float64(reports))
	r.counts.init(r.spool)
	r.samples.max = int64(cfg.MaxRejections)
	return r
}

// Count counts one request, made at now by the wall clock, that asked for cost tokens. rule and layer name the rule
// that refused it, and are empty when it was allowed. It takes well under a microsecond and never waits for a report.
func (r *Reporter) Count(now time.Time, tenant, route, rule, layer string, cost int64) {
	r.counts.add(now, usageKey{tenant, route, rule, layer}, cost)
}

// Reject offers a sample of a refused request. The first few of each flush are kept; the request itself must be
// counted with Count either way.
func (r *Reporter) Reject(j schemas.Rejection) {
	if !r.samples.add(j) {
		r.m.Rejections.WithLabelValues("dropped").Inc()
	}
}

// Pending says how many sealed reports are not yet known to be in the stream, and how many requests are not: in those
// reports and outside of them. A request that is being sealed may be in it twice.
func (r *Reporter) Pending() (reports int, requests uint64) {
	sealed := r.sealed.Load()
	total, _ := r.counts.total()
	reports, requests = r.spool.Len()
	return reports, requests + total - sealed
}

// Newest is the number of the newest report of this boot that has been sealed with requests, and so kept as well as the spool keeps
// anything; 0 when there is none. Later reports of buckets alone do not count: they need not outlive a power cut.
func (r *Reporter) Newest() uint64 { return r.newest.Load() }

// Run seals and sends until ctx is done, and then what is left, for at most DrainTimeout and Left. Requests should no longer
// come in by then. The error says what is lost, or may be: reports that a Spool keeps for the next life are not.
func (r *Reporter) Run(ctx context.Context) error {
	sending, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.send(sending)
	}()

	now := time.Now()
	r.usageAt, r.allAt, r.flushedAt = now, now, now
	tick := time.NewTicker(r.cfg.HotEvery)
	defer tick.Stop()
	var early <-chan time.Time // set while a hot bucket waits for HotMin to pass
	for ctx.Err() == nil {
		hot := r.buckets.Hot()
		if early != nil {
			hot = nil
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
			r.flush(false)
		case <-hot:
			if wait := r.cfg.HotMin - time.Since(r.flushedAt); wait > 0 {
				early = time.After(wait)
				continue
			}
			r.flush(false)
		case <-early:
			early = nil
			r.flush(false)
		case <-r.shrunk:
			r.seal()
			if r.late {
				r.flush(false)
			}
		}
	}

	timeout := max(0, min(r.cfg.DrainTimeout, r.cfg.Left()))
	deadline := time.After(timeout)
	for end := false; !end; {
		r.flush(true)
		if reports, requests := r.Pending(); reports == 0 && requests == 0 && r.merging() == 0 {
			break
		}
		select {
		case <-r.shrunk:
		case <-tick.C:
		case <-deadline:
			end = true
		}
	}
	stop()
	<-done
	reports, requests := r.Pending()
	if reports == 0 && requests == 0 {
		return nil
	}
	if r.cfg.Spool != nil {
		if lost := r.cfg.Spool.InMemory(); lost > 0 {
			return fmt.Errorf("drain usage of gateway %s: %d of %d requests are lost: neither the disk nor the stream has them", r.gateway, lost, requests)
		}
		r.log.Info("usage stays in the spool, the next start delivers it", "reports", reports, "requests", requests)
		return nil
	}
	err := fmt.Errorf("drain usage of gateway %s: %d reports and %d requests are not known to be stored after %s", r.gateway, reports, requests, timeout.Round(time.Millisecond))
	if last := r.lastErr.Load(); last != nil {
		err = fmt.Errorf("%w: %s", err, (*last).Error()) // not wrapped: a publish that our end cancelled is not the end we were asked for
	}
	return err
}

// flush gathers what is due, or everything, and seals it.
func (r *Reporter) flush(everything bool) {
	now := time.Now()
	all := everything || now.Sub(r.allAt) >= r.cfg.AllEvery
	if r.spool.Own() > 0 && !all && now.Sub(r.usageAt) < r.cfg.UsageEvery {
		r.late = true // hot buckets go out with their newest figures when the way is free, not behind older ones
		return
	}
	r.late = false
	if everything || now.Sub(r.usageAt) >= r.cfg.UsageEvery {
		r.usageAt = now
		r.m.Reports.Add(float64(r.spool.Recover()))
		r.gather()
		kept, dropped := r.pending.addRejections(r.samples.drain(), 10*r.cfg.MaxRejections)
		r.m.Rejections.WithLabelValues("kept").Add(float64(kept))
		r.m.Rejections.WithLabelValues("dropped").Add(float64(dropped))
	}
	// After the requests: what a report has counted, its buckets have given. A killed process then leaves no more untold of its
	// buckets than it counted after their last report.
	if everything || r.takesBuckets() {
		r.buckets.Collect(r.cfg.Clock(), all, r.pending.addTokens)
		if all {
			r.allAt = now
		}
	}
	r.flushedAt = now
	r.seal()
}

// takesBuckets says whether what buckets tell can be sealed now and is soon heard. Otherwise it stays with them, and adds up there: what a
// bucket was like long ago is of no use, and one that has not told what it gave is not let go of, so that no key has two entries.
func (r *Reporter) takesBuckets() bool {
	return len(r.pending.tokens) == 0 && r.spool.Own() < r.cfg.MaxReports && !r.spool.Full()
}

// gather takes over what was counted, when it can be sealed now. Otherwise it stays where it is: it merges there, and a
// spool on disk keeps it there.
func (r *Reporter) gather() {
	if len(r.pending.usage) == 0 && !r.spool.Full() {
		closed := r.generation
		r.generation++
		r.gathered = r.counts.drain(r.generation, r.pending.addUsage)
		if len(r.pending.usage) > 0 {
			r.pending.generation = closed
		}
	}
	total, _ := r.counts.total()
	r.m.Admitted.Add(float64(total - r.told))
	r.told = total
}

// seal makes reports of what is pending, all or none. What the spool does not take stays and merges.
func (r *Reporter) seal() {
	defer func() {
		r.m.Merged.Add(float64(r.merging() - r.wasMerging))
		r.wasMerging = r.merging()
	}()
	full := r.spool.Full()
	if r.full && !full && len(r.pending.usage) == 0 { // what has merged meanwhile
		r.gather()
	}
	r.full = full
	if r.pending.len() == 0 || full {
		return
	}
	bytes := r.cfg.MaxBytes
	if most := r.cfg.MaxPayload(); most > 0 {
		bytes = min(bytes, int(most)-headerBytes)
	}
	seq, requests, version, now := r.seq, uint64(0), r.cfg.PolicyVersion(), time.Now().UTC()
	var err error
	for report, at := r.pending.cut(cut{}, r.cfg.MaxEntries, bytes); report != nil && err == nil; report, at = r.pending.cut(at, r.cfg.MaxEntries, bytes) {
		seq++
		report.Gateway, report.Boot, report.Seq = r.gateway, r.boot, seq
		report.PolicyVersion, report.SealedAt = version, now
		requests += report.Requests()
		err = r.spool.Append(report)
	}
	if err == nil {
		err = r.spool.Commit(r.pending.generation)
	}
	if err != nil { // nothing was taken, the spool tells of it, and counts merge
		return
	}
	r.m.Reports.Add(float64(seq - r.seq))
	r.m.Spooled.Add(float64(requests))
	r.seq = seq
	r.sealed.Store(r.gathered)
	if r.pending.generation > 0 {
		r.newest.Store(seq)
	}
	r.pending.clear()
}

// headerBytes is room for what a message has besides its report.
const headerBytes = 512

func (r *Reporter) merging() int {
	_, cells := r.counts.total()
	if !r.full {
		cells = 0 // they wait for the next flush only
	}
	return r.pending.len() + cells
}

// hastyMin is how long the first attempt may take at least: four times what is usual, and doubling up to PublishTimeout.
const hastyMin = 50 * time.Millisecond

// send stores the spool's reports in order, each tried again until it is stored or ctx is done.
func (r *Reporter) send(ctx context.Context) {
	var failed, hasty int
	var since, told time.Time
	var usual time.Duration // that an attempt takes
	defer func() {
		if failed > 0 {
			r.m.Degraded.Dec()
		}
	}()
	answers, asking := make(chan answer), make(chan struct{})
	go func() {
		defer close(asking)
		r.ask(ctx, answers)
	}()
	defer func() { <-asking }()
	if reports, _ := r.spool.Len(); reports > 0 { // of earlier lives: what is stored already need not be sent
		select {
		case a := <-answers:
			r.confirm(a)
		case <-time.After(r.cfg.PublishTimeout):
		case <-ctx.Done():
		}
	}
	for ctx.Err() == nil {
		select {
		case a := <-answers:
			r.confirm(a)
		default:
		}
		report, again := r.spool.Next()
		if report == nil {
			select {
			case <-r.spool.Filled():
			case a := <-answers:
				r.confirm(a)
			case <-ctx.Done():
			}
			continue
		}
		timeout := min(max(hastyMin, 4*usual)<<min(hasty, 10), r.cfg.PublishTimeout)
		attempt, cancel := context.WithTimeout(ctx, timeout)
		began := time.Now()
		at, err := r.stream.Put(attempt, report, again)
		cancel()
		if err == nil {
			usual += (time.Since(began) - usual) / 8
			hasty = 0
			r.sent(report, at)
			if failed > 0 {
				r.m.Degraded.Dec()
				r.log.Info("usage reports are stored again", "after", time.Since(since).Round(time.Millisecond), "attempts", failed)
				failed = 0
				r.lastErr.Store(nil)
			}
			continue
		}
		r.lastErr.Store(&err)
		if timeout < r.cfg.PublishTimeout && errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			hasty++ // a message may be lost, and what the centre has not heard it divides without: no news yet
			continue
		}
		r.m.Failures.Inc()
		if errors.Is(err, ErrTooLarge) { // it must not hold up the others
			r.log.Error("usage report is larger than the server takes: it is kept, and the others go first", "boot", report.Boot, "seq", report.Seq, "err", err)
			r.spool.Skip()
		}
		if failed++; failed == 1 {
			since, told = time.Now(), time.Now()
			r.m.Degraded.Inc()
			r.log.Warn("usage report not stored, trying again until it is; requests go on", "seq", report.Seq, "err", err)
		} else if time.Since(told) >= r.cfg.LogEvery {
			told = time.Now()
			reports, requests := r.Pending()
			r.log.Warn("usage reports are still not stored", "for", time.Since(since).Round(time.Second), "attempts", failed, "reports", reports, "requests", requests, "err", err)
		}
		wait := min(r.cfg.RetryMax, r.cfg.RetryMin<<min(failed-1, 20))
		select {
		case <-time.After(wait/2 + rand.N(wait/2+1)): // half of it at random, or all gateways would come back at once
		case <-ctx.Done():
			return
		}
	}
}

func (r *Reporter) sent(report *schemas.Report, at uint64) {
	before := r.spool.Own()
	if r.spool.Sent(at) {
		r.m.Acked.Add(float64(report.Requests()))
	}
	r.m.Reports.Dec()
	r.m.Seconds.Observe(time.Since(report.SealedAt).Seconds())
	if before > 1 && !r.spool.Full() && before != r.cfg.MaxReports {
		return
	}
	r.wake()
}

func (r *Reporter) wake() {
	select {
	case r.shrunk <- struct{}{}:
	default:
	}
}

// answer is what the history has.
type answer struct {
	floor  schemas.Floor
	stored *schemas.Stored
}

// ask asks the history what it has while somebody waits for it, beside send: an answer that does not come must not hold
// up reports.
func (r *Reporter) ask(ctx context.Context, answers chan<- answer) {
	tick := time.NewTicker(confirmEvery)
	defer tick.Stop()
	for waiting, _ := r.spool.Len(); ; waiting = r.spool.Unconfirmed() {
		if waiting > 0 {
			attempt, cancel := context.WithTimeout(ctx, r.cfg.PublishTimeout)
			floor, stored, err := r.stream.Stored(attempt)
			cancel()
			if err != nil {
				r.m.Confirms.WithLabelValues("failed").Inc()
				r.log.Debug("the history does not say what it has", "err", err)
			} else {
				r.m.Confirms.WithLabelValues("ok").Inc()
				select {
				case answers <- answer{floor, stored}:
				case <-ctx.Done():
				}
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// confirm lets the spool forget what the history has.
func (r *Reporter) confirm(a answer) {
	before, _ := r.spool.Len()
	if again := r.spool.Stored(a.floor, a.stored); again > 0 {
		r.m.Again.Add(float64(again))
		r.log.Warn("reports that were in the stream are not in the history, sending them again", "reports", again)
	}
	after, _ := r.spool.Len()
	r.m.Reports.Add(float64(after - before))
	r.wake()
}
