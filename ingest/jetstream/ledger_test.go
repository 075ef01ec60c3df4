package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/weirhq/weir/internal/embedded/nats"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// tile fails unless the handled ranges follow one another from 1 to last.
func tile(t *testing.T, batches []schemas.Batch[*schemas.Report], last uint64) {
	t.Helper()
	next := uint64(1)
	for _, b := range batches {
		if b.First != next || b.Last < b.First {
			t.Fatalf("range %d-%d comes where %d is next", b.First, b.Last, next)
		}
		next = b.Last + 1
	}
	if next != last+1 {
		t.Fatalf("ranges end at %d, want %d", next-1, last)
	}
}

func floor(t *testing.T, js jetstream.JetStream) position {
	t.Helper()
	kv, err := js.KeyValue(context.Background(), natsx.HistoryBucket)
	if err != nil {
		t.Fatal(err)
	}
	entry, err := kv.Get(context.Background(), "history")
	if err != nil {
		return position{}
	}
	p, err := decodePosition(entry.Value())
	if err != nil {
		return position{}
	}
	return p
}

func TestLedgerRangesTileTheStream(t *testing.T) {
	_, nc, js := start(t)
	j := &journal{}
	m := NewMetrics(prometheus.NewRegistry())
	stop := run(t, ledger(t, nc, Config{MaxMessages: 7}, m), j.handle)
	publish(t, js, "gw", 1, 100)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 100 })
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	tile(t, j.batches, 100)
	stream, err := js.Stream(t.Context(), schemas.UsageStream)
	if err != nil {
		t.Fatal(err)
	}
	if want := streamName(schemas.UsageStream, stream.CachedInfo().Created, 0); j.batches[0].Stream != want {
		t.Errorf("batches are of %q, want %q", j.batches[0].Stream, want)
	}
	if info := consumerInfo(t, js, "history"); info.Config.AckPolicy != jetstream.AckAllPolicy || info.AckFloor.Stream != 100 {
		t.Errorf("consumer acknowledges %s up to %d, want all up to 100", info.Config.AckPolicy, info.AckFloor.Stream)
	}
	if n := testutil.ToFloat64(m.Messages.WithLabelValues("history")); n != 100 {
		t.Errorf("messages = %v, want 100", n)
	}
	if lag := testutil.ToFloat64(m.Lag.WithLabelValues("history")); lag > 5 {
		t.Errorf("lag = %v", lag)
	}
}

// One insert a second: what comes within MaxDelay of the first message is one range.
func TestLedgerWaitsForMoreUpToMaxDelay(t *testing.T) {
	_, nc, js := start(t)
	j := &journal{}
	run(t, ledger(t, nc, Config{MaxDelay: 500 * time.Millisecond}, nil), j.handle)
	publish(t, js, "gw", 1, 50)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 50 })
	if len(j.batches) > 3 {
		t.Errorf("%d ranges for a burst of 50 messages, want few", len(j.batches))
	}
}

func TestLedgerGivesExactlyTheSameRangeAfterAnError(t *testing.T) {
	_, nc, js := start(t)
	publish(t, js, "gw", 1, 10)
	failing := &journal{fail: func(schemas.Batch[*schemas.Report]) error { return errors.New("clickhouse is away") }}
	l := ledger(t, nc, Config{MaxMessages: 10}, nil)
	stop := run(t, l, failing.handle)
	eventually(t, "it has been tried a few times", func() bool { return len(failing.calls()) >= 3 })
	publish(t, js, "gw", 11, 30) // must not get into the range
	if err := l.Ready(); err == nil || !strings.Contains(err.Error(), "clickhouse is away") {
		t.Errorf("Ready = %v, want what is in the way", err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	first := failing.calls()[0]
	for _, c := range failing.calls() {
		if c != first {
			t.Fatalf("range became %s, was %s", c, first)
		}
	}
	j := &journal{}
	stop = run(t, ledger(t, nc, Config{MaxMessages: 1000}, nil), j.handle)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 30 })
	_ = stop()
	if got := j.calls()[0]; got != first {
		t.Fatalf("range after a restart is %s, was %s", got, first)
	}
	tile(t, j.batches, 30)
}

// The test binary runs itself as a history writer that is killed by SIGKILL at a chosen point.
func TestMain(m *testing.M) {
	if url := os.Getenv("WEIR_TEST_LEDGER"); url != "" {
		child(url, os.Getenv("WEIR_TEST_POINT"), os.Getenv("WEIR_TEST_JOURNAL"))
	}
	os.Exit(m.Run())
}

func child(url, point, file string) {
	must := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	nc, err := natsx.ConnectCheck(context.Background(), natsx.Config{URL: url}, quiet, nil)
	must(err)
	max, err := strconv.Atoi(os.Getenv("WEIR_TEST_MAX"))
	must(err)
	l, err := NewLedger(Config{Name: "history", MaxMessages: max, MaxDelay: 20 * time.Millisecond}, nc, schemas.DecodeReport, quiet, nil)
	must(err)
	out, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	must(err)
	must(l.Consume(context.Background(), func(_ context.Context, b schemas.Batch[*schemas.Report]) error {
		_, err := fmt.Fprintln(out, "called", name(b))
		must(err)
		if point == "before" { // the intent is written, the store has nothing
			must(syscall.Kill(os.Getpid(), syscall.SIGKILL))
			select {}
		}
		_, err = fmt.Fprintln(out, "stored", name(b))
		must(err)
		if point == "after" { // the store has it, the floor does not say so
			must(syscall.Kill(os.Getpid(), syscall.SIGKILL))
			select {}
		}
		return nil
	}))
}

func TestKilledLedgerRedoesExactlyItsRange(t *testing.T) {
	for _, point := range []string{"before", "after"} {
		t.Run(point, func(t *testing.T) {
			url, _, js := start(t)
			file := t.TempDir() + "/journal"
			spawn := func(point string, max int) *exec.Cmd {
				cmd := exec.Command(os.Args[0])
				cmd.Env = append(os.Environ(), "WEIR_TEST_LEDGER="+url, "WEIR_TEST_POINT="+point, "WEIR_TEST_JOURNAL="+file, "WEIR_TEST_MAX="+strconv.Itoa(max))
				cmd.Stderr = os.Stderr
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
				return cmd
			}
			lines := func() []string {
				b, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				return strings.Split(strings.TrimSpace(string(b)), "\n")
			}
			publish(t, js, "gw", 1, 25)
			for i, max := range []int{10, 3, 1000} { // three lives that die, each with another idea of a batch
				err := spawn(point, max).Wait()
				var exit *exec.ExitError
				if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
					t.Fatalf("child ended with %v, want SIGKILL", err)
				}
				publish(t, js, "gw", uint64(26+10*i), uint64(35+10*i))
			}
			want := lines()[0]
			for _, l := range lines() {
				if strings.TrimPrefix(l, "stored ") != strings.TrimPrefix(want, "called ") && l != want {
					t.Fatalf("after a kill the handler got\n%s, before it\n%s", l, want)
				}
			}
			if p := floor(t, js); p.Floor != 0 || p.Next != 10 {
				t.Fatalf("position = %+v, want 1 to 10 in hand", p)
			}
			last := spawn("", 10)
			eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 55 })
			_ = last.Process.Kill()
			stored := map[string]bool{}
			for _, l := range lines() {
				if s, ok := strings.CutPrefix(l, "stored "); ok {
					stored[s] = true // a store that drops a range it has
				}
			}
			seen := map[string]int{}
			for s := range stored {
				for _, item := range strings.Fields(s)[2:] {
					seen[item]++
				}
			}
			if len(seen) != 55 {
				t.Errorf("%d messages are stored, want 55", len(seen))
			}
			for item, n := range seen {
				if n != 1 {
					t.Errorf("message %s is stored %d times", item, n)
				}
			}
		})
	}
}

// Two writers of one history: the one that came later goes on, and the other learns of it before it acknowledges.
func TestSecondLedgerFencesTheFirst(t *testing.T) {
	url, nc, js := start(t)
	publish(t, js, "gw", 1, 10)
	entered, release := make(chan struct{}), make(chan struct{})
	old := &journal{}
	ctx := t.Context()
	oldLedger := ledger(t, nc, Config{MaxMessages: 4}, nil)
	ended := make(chan error, 1)
	go func() {
		ended <- oldLedger.Consume(ctx, func(ctx context.Context, b schemas.Batch[*schemas.Report]) error {
			close(entered) // a second call would panic: it must not get that far
			<-release
			return old.handle(ctx, b)
		})
	}()
	<-entered

	other, _ := connect(t, url)
	j := &journal{}
	run(t, ledger(t, other, Config{MaxMessages: 100}, nil), j.handle)
	eventually(t, "the new one has handled all", func() bool { return floor(t, js).Floor == 10 })
	close(release)
	select {
	case err := <-ended:
		if !errors.Is(err, ErrFenced) || !strings.Contains(err.Error(), "history") {
			t.Errorf("Consume = %v, want %v with the ledger's name", err, ErrFenced)
		}
	case <-time.After(patience):
		t.Fatal("the first ledger goes on")
	}
	if oldLedger.Ready() == nil {
		t.Error("the first ledger says it is ready")
	}
	if old.calls()[0] != j.calls()[0] {
		t.Errorf("the range in hand was taken over as %s, was %s", j.calls()[0], old.calls()[0])
	}
	tile(t, j.batches, 10)
}

func TestPoisonGoesToTheDeadLettersOnce(t *testing.T) {
	_, nc, js := start(t)
	publish(t, js, "gw", 1, 2)
	poison := []byte("not a report\x00\xff")
	raw(t, js, schemas.UsagePrefix+"gw", poison)
	publish(t, js, "gw", 4, 5)
	n := 0
	j := &journal{fail: func(schemas.Batch[*schemas.Report]) error { // the range comes again, in this process
		if n++; n <= 2 {
			return errors.New("away")
		}
		return nil
	}}
	failing := &journal{fail: func(schemas.Batch[*schemas.Report]) error { return errors.New("away") }}
	stop := run(t, ledger(t, nc, Config{}, nil), failing.handle)
	eventually(t, "it was tried", func() bool { return len(failing.calls()) > 0 })
	_ = stop() // … and in the next
	run(t, source(t, nc, Config{}, nil), (&journal{}).handle)
	m := NewMetrics(prometheus.NewRegistry())
	run(t, ledger(t, nc, Config{}, m), j.handle)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 5 })
	if j.distinct() != 4 {
		t.Errorf("%d messages were handled, want 4", j.distinct())
	}
	if n := messages(t, js, schemas.DeadStream); n != 1 {
		t.Fatalf("%d dead letters, want 1", n)
	}
	stream, err := js.Stream(t.Context(), schemas.DeadStream)
	if err != nil {
		t.Fatal(err)
	}
	msg, err := stream.GetMsg(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if msg.Subject != schemas.DeadPrefix+schemas.ReasonMalformed || string(msg.Data) != string(poison) {
		t.Errorf("dead letter is on %s with %q", msg.Subject, msg.Data)
	}
	for key, want := range map[string]string{HeaderReason: "malformed", HeaderSubject: schemas.UsagePrefix + "gw", HeaderSequence: "3", HeaderStream: schemas.UsageStream} {
		if got := msg.Header.Get(key); got != want {
			t.Errorf("%s = %q, want %q", key, got, want)
		}
	}
	if got := msg.Header.Get(HeaderDetail); !strings.HasPrefix(got, "malformed: ") {
		t.Errorf("%s = %q", HeaderDetail, got)
	}
	if id := msg.Header.Get(jetstream.MsgIDHeader); !strings.HasPrefix(id, schemas.UsageStream) || !strings.HasSuffix(id, "-3") {
		t.Errorf("message id = %q", id)
	}
}

// While a dead letter cannot be stored its range is not handled and not acknowledged.
func TestLedgerWaitsForTheDeadLetterStream(t *testing.T) {
	_, nc, js := start(t)
	if err := js.DeleteStream(t.Context(), schemas.DeadStream); err != nil {
		t.Fatal(err)
	}
	raw(t, js, schemas.UsagePrefix+"gw", []byte{0xff})
	publish(t, js, "gw", 2, 3)
	m := NewMetrics(prometheus.NewRegistry())
	j := &journal{}
	run(t, ledger(t, nc, Config{}, m), j.handle)
	eventually(t, "it has tried", func() bool { return testutil.ToFloat64(m.Failures.WithLabelValues("history", "dead_letter")) >= 2 })
	if p := floor(t, js); p.Floor != 0 || j.distinct() != 0 {
		t.Fatalf("position = %+v with %d handled, want nothing done", p, j.distinct())
	}
	declare(t, js)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 3 && j.distinct() == 2 })
	if n := messages(t, js, schemas.DeadStream); n != 1 {
		t.Errorf("%d dead letters, want 1", n)
	}
}

// A gateway that fills the dead letters with rubbish holds up nobody: the rest is handled, what has no letter is not let go of by its
// gateway, and once there is room it gets one.
func TestFullDeadLettersHoldUpNobody(t *testing.T) {
	_, nc, js := start(t)
	if err := natsx.Declare(t.Context(), js, natsx.Storage{DeadMaxBytes: 8 << 10}); err != nil {
		t.Fatal(err)
	}
	m := NewMetrics(prometheus.NewRegistry())
	var mu sync.Mutex
	buried := map[uint64]bool{}
	j := &journal{}
	run(t, ledger(t, nc, Config{MaxMessages: 10, Settled: func(_ string, _ uint64, all []Buried) {
		mu.Lock()
		defer mu.Unlock()
		for _, b := range all {
			buried[b.Seq] = true
		}
	}}, m), func(ctx context.Context, b schemas.Batch[*schemas.Report]) error {
		_ = j.handle(ctx, b)
		var not schemas.Refused
		for _, it := range b.Items {
			if it.Value.Gateway == "honest" {
				not = append(not, schemas.RefusedMessage{Seq: it.Seq, Detail: "code 469"})
			}
		}
		if not != nil {
			return not
		}
		return nil
	})
	for i := range 40 { // large ones, and small ones for what is left between them
		raw(t, js, schemas.UsagePrefix+"rogue", make([]byte, 1+(40-i)/20*1000))
	}
	publish(t, js, "gw", 1, 20)
	honest := newPublisher(t, nc, "honest")
	if _, err := honest.Put(t.Context(), report("b", 1, 1), false); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 61 })
	n := messages(t, js, schemas.DeadStream)
	if unkept := testutil.ToFloat64(m.Unkept.WithLabelValues("history")); n == 0 || n > 20 || unkept != 41-float64(n) || j.distinct() != 21 {
		t.Errorf("%d letters, %v without one, %d handled, want a few, the others of 41, and 21", n, unkept, j.distinct())
	}
	told := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return buried[1]
	}
	if told() {
		t.Error("a gateway is told that its report is a dead letter, and it is none")
	}
	d := letters(t, nc)
	all, err := d.List(t.Context(), "", 100)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range all {
		if err := d.Drop(t.Context(), l.ID); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := honest.Put(t.Context(), report("b", 1, 1), true); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its gateway is told", told)
}

// B067: a report of 2 MiB on a server that takes it is refused once; the others do not suffer. Its dead letter would be
// larger than the server takes, so it carries the beginning.
func TestB067OversizeReportIsRefusedAlone(t *testing.T) {
	url := custom(t, server.Options{MaxPayload: 2 << 20})
	nc, js := connect(t, url)
	declare(t, js)
	big := append([]byte(`{"boot":"b"`), make([]byte, 2<<20-100)...)
	publish(t, js, "gw", 1, 500)
	raw(t, js, schemas.UsagePrefix+"gw", big)
	publish(t, js, "gw", 502, 1000)
	m := NewMetrics(prometheus.NewRegistry())
	j := &journal{}
	run(t, ledger(t, nc, Config{}, m), j.handle)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 1000 })
	if j.distinct() != 999 {
		t.Errorf("%d were handled, want 999", j.distinct())
	}
	if n := testutil.ToFloat64(m.Refused.WithLabelValues("history", schemas.ReasonSize)); n != 1 {
		t.Errorf("refused for size = %v, want 1", n)
	}
	stream, err := js.Stream(t.Context(), schemas.DeadStream)
	if err != nil {
		t.Fatal(err)
	}
	msg, err := stream.GetMsg(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if msg.Header.Get(HeaderTruncated) != strconv.Itoa(len(big)) || len(msg.Data) >= len(big) || len(msg.Data) < 2<<20-4<<10 {
		t.Errorf("dead letter has %d of %d bytes and %s = %q", len(msg.Data), len(big), HeaderTruncated, msg.Header.Get(HeaderTruncated))
	}
}

// Messages that were removed before they were read are told, counted and passed over; ranges still tile.
func TestMissingMessagesAreToldAndPassedOver(t *testing.T) {
	_, nc, js := start(t)
	short(t, js, func(*jetstream.StreamConfig) {})
	publish(t, js, "gw", 1, 20)
	stream, err := js.Stream(t.Context(), schemas.UsageStream)
	if err != nil {
		t.Fatal(err)
	}
	for _, seq := range []uint64{1, 2, 7, 8, 9, 20} {
		if err := stream.DeleteMsg(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
	}
	publish(t, js, "gw", 21, 22)
	m := NewMetrics(prometheus.NewRegistry())
	j := &journal{}
	run(t, ledger(t, nc, Config{MaxMessages: 5}, m), j.handle)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 22 })
	tile(t, j.batches, 22)
	if j.distinct() != 16 {
		t.Errorf("%d were handled, want 16", j.distinct())
	}
	if n := testutil.ToFloat64(m.Missing.WithLabelValues("history")); n != 6 {
		t.Errorf("missing = %v, want 6", n)
	}
}

// The stream has forgotten what we have handled (a power cut without sync_interval: always) and uses its numbers again:
// nothing of the new is skipped, and no range has the name of an old one.
func TestStreamThatWentBackInTime(t *testing.T) {
	for _, was := range []position{{Floor: 12, Next: 12}, {Floor: 5, Next: 12}} {
		t.Run(fmt.Sprintf("%d-%d", was.Floor, was.Next), func(t *testing.T) { wentBack(t, was) })
	}
}

func wentBack(t *testing.T, was position) {
	_, nc, js := start(t)
	publish(t, js, "gw", 1, 5)
	stream, err := js.Stream(t.Context(), schemas.UsageStream)
	if err != nil {
		t.Fatal(err)
	}
	kv, err := js.KeyValue(t.Context(), natsx.HistoryBucket)
	if err != nil {
		t.Fatal(err)
	}
	plain := streamName(schemas.UsageStream, stream.CachedInfo().Created, 0)
	was.Stream, was.Owner = plain, "x"
	value, err := json.Marshal(was)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Put(t.Context(), "history", value); err != nil {
		t.Fatal(err)
	}
	j := &journal{}
	run(t, ledger(t, nc, Config{}, nil), j.handle)
	eventually(t, "the position has gone back", func() bool { p := floor(t, js); return p.Floor == 5 && p.Next == 5 })
	publish(t, js, "gw", 6, 9)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 9 })
	if j.distinct() != 4 || j.batches[0].First != 6 || j.batches[0].Stream == plain {
		t.Errorf("%d were handled, first range is %s", j.distinct(), name(j.batches[0]))
	}
}

func TestLedgerWhosePositionIsDeletedWritesItAgain(t *testing.T) {
	_, nc, js := start(t)
	j := &journal{}
	run(t, ledger(t, nc, Config{}, nil), j.handle)
	publish(t, js, "gw", 1, 5)
	eventually(t, "5 are handled", func() bool { return floor(t, js).Floor == 5 })
	if err := js.DeleteKeyValue(t.Context(), natsx.HistoryBucket); err != nil {
		t.Fatal(err)
	}
	publish(t, js, "gw", 6, 9)
	declare(t, js)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 9 })
	tile(t, j.batches, 9)
}

// T5: who may ask a server something can have the answer written over the position. A ledger that runs writes it again, and one
// that starts goes on from the one before, with the range that was in hand, or from what its consumer has acknowledged.
func TestT5StrangePositionIsPassedOver(t *testing.T) {
	_, nc, js := start(t)
	kv, err := js.KeyValue(t.Context(), natsx.HistoryBucket)
	if err != nil {
		t.Fatal(err)
	}
	litter := func(what string) {
		t.Helper()
		if _, err := kv.Put(t.Context(), "history", []byte(what)); err != nil {
			t.Fatal(err)
		}
	}
	const answer = `{"stream":"WEIR_USAGE","seq":5}`
	strange := func() error {
		strange, err := Misplaced(t.Context(), js, "history")
		if err != nil {
			t.Fatal(err)
		}
		return strange
	}
	j := &journal{}
	stop := run(t, ledger(t, nc, Config{MaxMessages: 3}, nil), j.handle)
	for i := range uint64(4) {
		publish(t, js, "gw", 5*i+1, 5*i+5)
		eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 5*i+5 })
		litter([]string{answer, "", "\x00\xff", "{}"}[i])
		if strange() == nil {
			t.Errorf("nobody is told of what is written over the position")
		}
	}
	publish(t, js, "gw", 21, 22)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 22 })
	if err := stop(); err != nil {
		t.Fatalf("Consume = %v, want that nobody has taken over", err)
	}
	tile(t, j.batches, 22)

	failing := &journal{fail: func(schemas.Batch[*schemas.Report]) error { return errors.New("away") }}
	publish(t, js, "gw", 23, 26)
	stop = run(t, ledger(t, nc, Config{MaxMessages: 2}, nil), failing.handle)
	eventually(t, "a range is in hand", func() bool { return len(failing.calls()) > 0 })
	_ = stop()
	litter(answer)
	stop = run(t, ledger(t, nc, Config{MaxMessages: 100}, nil), j.handle)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 26 })
	_ = stop()
	tile(t, j.batches, 26)
	if !slices.Contains(j.calls(), failing.calls()[0]) {
		t.Errorf("range %s was in hand, and is not in %q", failing.calls()[0], j.calls())
	}

	eventually(t, "all are acknowledged", func() bool { return consumerInfo(t, js, "history").AckFloor.Stream == 26 })
	for range 70 {
		litter(answer)
	}
	publish(t, js, "gw", 27, 28)
	run(t, ledger(t, nc, Config{}, nil), j.handle)
	eventually(t, "all are handled", func() bool { return floor(t, js).Floor == 28 })
	tile(t, j.batches, 28)
	if err := strange(); err != nil {
		t.Errorf("Misplaced = %v", err)
	}
}

// A ledger that cannot find or write its position lags: what comes in is not handled.
func TestLedgerWithoutItsPositionLags(t *testing.T) {
	_, nc, js := start(t)
	if err := js.DeleteKeyValue(t.Context(), natsx.HistoryBucket); err != nil {
		t.Fatal(err)
	}
	m := NewMetrics(prometheus.NewRegistry())
	run(t, ledger(t, nc, Config{}, m), (&journal{}).handle)
	eventually(t, "it lags", func() bool { return testutil.ToFloat64(m.Lag.WithLabelValues("history")) > 0 })
}

// A server that stops and comes back with its store: nothing is lost, and the ledger does each message once.
func TestLedgerOverAServerRestart(t *testing.T) {
	cfg := nats.Config{Dir: t.TempDir()}
	srv, err := nats.Start(cfg, quiet)
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(srv.URL())
	if err != nil {
		t.Fatal(err)
	}
	nc, js := connect(t, srv.URL())
	declare(t, js)
	j := &journal{}
	l := ledger(t, nc, Config{MaxMessages: 5}, nil)
	run(t, l, j.handle)
	publish(t, js, "gw", 1, 20)
	srv.Stop()
	eventually(t, "it is not ready", func() bool { return l.Ready() != nil })
	if cfg.Port, err = strconv.Atoi(u.Port()); err != nil {
		t.Fatal(err)
	}
	if srv, err = nats.Start(cfg, quiet); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Stop)
	eventually(t, "the stream is there", func() bool { // what is sent on the way to a server that begins may get lost, and is ours to send again
		_, err := js.Stream(t.Context(), schemas.UsageStream)
		return err == nil
	})
	publish(t, js, "gw", 21, 40)
	eventually(t, "all are handled", func() bool { return nc.IsConnected() && j.distinct() == 40 })
	for seq, n := range j.seqs {
		if n != 1 {
			t.Errorf("message %d was handled %d times", seq, n)
		}
	}
}
