package natsx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/schemas"
)

// Key-value buckets.
const (
	PolicyBucket   = "weir-policy"
	SwitchesBucket = "weir-switches"
	HistoryBucket  = "weir-history"       // how far each history consumer has come
	StoredBucket   = schemas.StoredBucket // which reports the history has, for the gateways that keep them until then
)

// Storage says how much the streams keep. A zero field means its default for a stream that is made, and "as it is"
// for one that is there.
type Storage struct {
	Replicas       int           // of every stream and bucket (1)
	UsageMaxAge    time.Duration // (7 days)
	UsageMaxBytes  int64         // a full stream refuses reports and gateways keep them (4 GiB)
	AlertsMaxBytes int64         // (256 MiB)
	DeadMaxBytes   int64         // a full dead-letter stream takes no more; nobody waits for it (1 GiB)
}

const (
	day = 24 * time.Hour
	mib = 1 << 20

	duplicates = 10 * time.Minute
)

// streams are the streams as they are made.
func (s Storage) streams() []jetstream.StreamConfig {
	keep := func(name, subjects, description string, maxBytes int64, maxAge time.Duration) jetstream.StreamConfig {
		return jetstream.StreamConfig{
			Name:        name,
			Description: description,
			Subjects:    []string{subjects},
			Storage:     jetstream.FileStorage,
			Retention:   jetstream.LimitsPolicy,
			Discard:     jetstream.DiscardNew,
			MaxAge:      maxAge,
			MaxBytes:    maxBytes,
			MaxMsgs:     -1,
			MaxMsgSize:  -1,

			MaxMsgsPerSubject: -1,
			MaxConsumers:      -1,
			Duplicates:        duplicates,
			Replicas:          or(s.Replicas, 1),
			DenyDelete:        name != schemas.DeadStream, // a dead letter is deleted when it was replayed or dropped
			DenyPurge:         true,
			// A direct read may come from a replica that is behind, and publishers decide by what they read.
			AllowDirect: false,
		}
	}
	return []jetstream.StreamConfig{
		keep(schemas.UsageStream, schemas.UsagePrefix+"*", "usage reports of gateways", or(s.UsageMaxBytes, 4096*mib), or(s.UsageMaxAge, 7*day)),
		keep(schemas.AlertsStream, schemas.AlertPrefix+"*", "alerts that fired or were resolved", or(s.AlertsMaxBytes, 256*mib), 90*day),
		keep(schemas.DeadStream, schemas.DeadPrefix+"*", "messages that could not be read, with the reason", or(s.DeadMaxBytes, 1024*mib), 90*day),
	}
}

func (s Storage) buckets() []jetstream.KeyValueConfig {
	return []jetstream.KeyValueConfig{
		{Bucket: PolicyBucket, Description: "policies, by version", History: 64, Storage: jetstream.FileStorage, Replicas: or(s.Replicas, 1)},
		{Bucket: SwitchesBucket, Description: "switches that operators throw", History: 64, Storage: jetstream.FileStorage, Replicas: or(s.Replicas, 1)},
		{Bucket: HistoryBucket, Description: "how far each history consumer has come", History: 64, Storage: jetstream.FileStorage, Replicas: or(s.Replicas, 1)},
		{Bucket: StoredBucket, Description: "which reports the history has", History: 1, Storage: jetstream.FileStorage, Replicas: or(s.Replicas, 1)},
	}
}

func or[T comparable](v, otherwise T) T {
	var zero T
	if v == zero {
		return otherwise
	}
	return v
}

// Declare makes the streams and buckets that are missing. One that is there keeps its settings, save for ages and
// sizes that s names; an error lists every setting of it by which usage would be lost. Declare may be called again at
// any time, by any number of processes.
func Declare(ctx context.Context, js jetstream.JetStream, s Storage) error {
	var all []error
	for _, want := range s.streams() {
		if err := s.declareStream(ctx, js, want); err != nil {
			all = append(all, err)
		}
	}
	for _, want := range s.buckets() {
		if err := declareBucket(ctx, js, want); err != nil {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}

func (s Storage) declareStream(ctx context.Context, js jetstream.JetStream, want jetstream.StreamConfig) error {
	stream, err := js.Stream(ctx, want.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if stream, err = js.CreateStream(ctx, want); errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // somebody was faster
			stream, err = js.Stream(ctx, want.Name)
		}
	}
	if err != nil {
		return fmt.Errorf("declare stream %s: %w", want.Name, err)
	}
	is := stream.CachedInfo().Config
	var losing []error
	for _, f := range streamFaults(is, want) {
		if f.loses {
			losing = append(losing, fmt.Errorf("stream %s: %s", want.Name, f.text))
		}
	}
	if len(losing) > 0 {
		return errors.Join(losing...)
	}
	next := is
	switch want.Name {
	case schemas.UsageStream:
		next.MaxBytes, next.MaxAge = or(s.UsageMaxBytes, is.MaxBytes), or(s.UsageMaxAge, is.MaxAge)
	case schemas.AlertsStream:
		next.MaxBytes = or(s.AlertsMaxBytes, is.MaxBytes)
	case schemas.DeadStream:
		next.MaxBytes = or(s.DeadMaxBytes, is.MaxBytes)
	}
	if next.MaxBytes == is.MaxBytes && next.MaxAge == is.MaxAge {
		return nil
	}
	if _, err := js.UpdateStream(ctx, next); err != nil {
		return fmt.Errorf("update stream %s to max_bytes %d and max_age %s: %w", want.Name, next.MaxBytes, next.MaxAge, err)
	}
	return nil
}

func declareBucket(ctx context.Context, js jetstream.JetStream, want jetstream.KeyValueConfig) error {
	_, err := js.KeyValue(ctx, want.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		if _, err = js.CreateKeyValue(ctx, want); errors.Is(err, jetstream.ErrBucketExists) {
			err = nil
		}
	}
	if err != nil {
		return fmt.Errorf("declare bucket %s: %w", want.Bucket, err)
	}
	stream, err := js.Stream(ctx, "KV_"+want.Bucket)
	if err != nil {
		return fmt.Errorf("declare bucket %s: %w", want.Bucket, err)
	}
	is := stream.CachedInfo().Config
	next := is
	next.AllowDirect = is.AllowDirect && want.Bucket != StoredBucket
	if is.MaxMsgsPerSubject > 0 {
		next.MaxMsgsPerSubject = max(is.MaxMsgsPerSubject, int64(want.History))
	}
	if next.AllowDirect != is.AllowDirect || next.MaxMsgsPerSubject != is.MaxMsgsPerSubject {
		if stream, err = js.UpdateStream(ctx, next); err != nil {
			return fmt.Errorf("update bucket %s to allow_direct %t and a history of %d: %w", want.Bucket, next.AllowDirect, next.MaxMsgsPerSubject, err)
		}
	}
	for _, f := range bucketFaults(stream.CachedInfo().Config) {
		if f.loses {
			err = errors.Join(err, fmt.Errorf("bucket %s: %s", want.Bucket, f.text))
		}
	}
	return err
}

// fault is a setting that is not as it should be. One that loses usage is fatal.
type fault struct {
	trap  string // of FACTS
	text  string
	loses bool
}

func streamFaults(is, want jetstream.StreamConfig) []fault {
	var all []fault
	check := func(ok bool, trap string, loses bool, format string, args ...any) {
		if !ok {
			all = append(all, fault{trap, fmt.Sprintf(format, args...), loses})
		}
	}
	check(is.Storage == jetstream.FileStorage, "T3", true, "storage is %s, want file: a restart would lose what is in memory", is.Storage)
	check(is.Retention == jetstream.LimitsPolicy, "T6", true, "retention is %s, want limits: a message acknowledged by one consumer must stay for the others", is.Retention)
	check(is.Discard == jetstream.DiscardNew, "T19", true, "discard is %s, want new: a full stream would delete what nobody has read", is.Discard)
	check(is.MaxMsgsPerSubject <= 0 || is.DiscardNewPerSubject, "T19", true, "max_msgs_per_subject is %d, want -1: older messages of a subject would be deleted unread", is.MaxMsgsPerSubject)
	check(is.PersistMode != jetstream.AsyncPersistMode, "T3", true, "persist_mode is async, want default: messages would be acknowledged before they are written")
	check(!is.NoAck, "T3", true, "no_ack is true, want false: publishers could not know what is stored")
	check(is.MaxAge == 0 || is.MaxAge >= min(day, want.MaxAge), "T6", true, "max_age is %s, want %s or more: unread messages would expire", is.MaxAge, min(day, want.MaxAge))
	check(is.MaxMsgSize < 0 || is.MaxMsgSize == 0 || is.MaxMsgSize >= schemas.MaxReportBytes, "T19", true, "max_msg_size is %d, want -1 or at least %d", is.MaxMsgSize, schemas.MaxReportBytes)
	check(slices.Equal(is.Subjects, want.Subjects), "T19", true, "subjects are %q, want %q", is.Subjects, want.Subjects)
	check(!is.Sealed, "T19", true, "sealed is true: nothing can be stored")
	check(is.MaxBytes > 0, "T19", false, "max_bytes is %d, want a size that the disk has: a full disk stops every stream of the server", is.MaxBytes)
	check((is.DenyDelete || !want.DenyDelete) && is.DenyPurge, "T19", false, "deny_delete is %t and deny_purge is %t, want %t and true: anybody with the API could remove usage", is.DenyDelete, is.DenyPurge, want.DenyDelete)
	check(!is.DenyDelete || want.DenyDelete, "T19", false, "deny_delete is true, want false: dead letters can be neither replayed nor dropped, and the stream fills up")
	check(is.MaxAge == 0 || is.MaxAge >= is.Duplicates, "T6", false, "duplicate_window %s is longer than max_age %s", is.Duplicates, is.MaxAge)
	check(is.Duplicates >= duplicates, "T5", false, "duplicate_window is %s, want %s: a dead letter could be stored twice", is.Duplicates, duplicates)
	check(!is.AllowDirect || is.Replicas == 1, "T10", false, "allow_direct is true with %d replicas, want false: a publisher could read an old last message", is.Replicas)
	return all
}

func bucketFaults(is jetstream.StreamConfig) []fault {
	var all []fault
	if is.Storage != jetstream.FileStorage {
		all = append(all, fault{"T3", fmt.Sprintf("storage is %s, want file", is.Storage), true})
	}
	if is.MaxAge != 0 {
		all = append(all, fault{"T6", fmt.Sprintf("ttl is %s, want none: entries would vanish", is.MaxAge), true})
	}
	if is.AllowDirect && is.Name == "KV_"+StoredBucket {
		// The answer to a direct read can be an empty message, on any subject that the reader names: $JS.API.STREAM.DELETE, say.
		all = append(all, fault{"T5", "allow_direct is true, want false: a gateway that may read it so can have the server delete streams", false})
	}
	return all
}

// Problem is something that `weir doctor` shows.
type Problem struct {
	Trap  string // of our notes on the servers: T3, T6, …; not shown
	Where string // server, connection, or the stream or consumer's name
	Text  string
	Note  bool // cannot be checked from here: for a person to look at
}

func (p Problem) String() string { return p.Where + ": " + p.Text }

// minServer is the first server version without known ways around permissions (FACTS 1.7), and with consumer reset.
const minServer = "2.14.0"

// Problems looks for the settings by which usage is lost, as far as a client can see them. The settings of an embedded server
// that no client sees are known to be right.
func Problems(ctx context.Context, nc *nats.Conn, js jetstream.JetStream, embedded bool) ([]Problem, error) {
	var all []Problem
	if o := nc.Opts; o.MaxReconnect >= 0 || o.ReconnectedCB == nil || o.AsyncErrorCB == nil {
		all = append(all, Problem{Trap: "T18", Where: "connection", Text: fmt.Sprintf("gives up after %d attempts to reconnect, or tells nobody", o.MaxReconnect)})
	}
	if v := nc.ConnectedServerVersion(); older(v, minServer) {
		all = append(all, Problem{Trap: "1.7", Where: "server", Text: fmt.Sprintf("is version %s, want %s or later", v, minServer)})
	}
	if n := nc.MaxPayload(); n > 0 && n < schemas.MaxReportBytes {
		all = append(all, Problem{Trap: "1.1", Where: "server", Text: fmt.Sprintf("max_payload is %d, want %d or more", n, schemas.MaxReportBytes)})
	}
	if !embedded {
		all = append(all, Problem{Trap: "T3", Where: "server", Note: true,
			Text: "sync_interval cannot be read by a client: see that jetstream { sync_interval: always } is in the server's configuration, or a power cut loses acknowledged usage"})
	}

	for _, want := range (Storage{}).streams() {
		stream, err := js.Stream(ctx, want.Name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			all = append(all, Problem{Trap: "T19", Where: want.Name, Text: "does not exist yet: the aggregator and the alerter make it"})
			continue
		}
		if err != nil {
			return all, fmt.Errorf("look at stream %s: %w", want.Name, err)
		}
		info := stream.CachedInfo()
		for _, f := range streamFaults(info.Config, want) {
			all = append(all, Problem{Trap: f.trap, Where: want.Name, Text: f.text})
		}
		if size := info.Config.MaxBytes; size > 0 && info.State.Bytes*10 >= uint64(size)*7 {
			all = append(all, Problem{Trap: "T19", Where: want.Name, Text: fmt.Sprintf("is %d %% full: when it is full, messages are refused", info.State.Bytes*100/uint64(size))})
		}
		consumers := stream.ListConsumers(ctx)
		for c := range consumers.Info() {
			for _, text := range consumerFaults(c.Config) {
				all = append(all, Problem{Trap: text[0], Where: want.Name + "/" + c.Name, Text: text[1]})
			}
		}
		if err := consumers.Err(); err != nil {
			return all, fmt.Errorf("list consumers of %s: %w", want.Name, err)
		}
	}
	for _, want := range (Storage{}).buckets() {
		stream, err := js.Stream(ctx, "KV_"+want.Bucket)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			continue
		}
		if err != nil {
			return all, fmt.Errorf("look at bucket %s: %w", want.Bucket, err)
		}
		for _, f := range bucketFaults(stream.CachedInfo().Config) {
			all = append(all, Problem{Trap: f.trap, Where: want.Bucket, Text: f.text})
		}
	}
	return all, nil
}

func consumerFaults(c jetstream.ConsumerConfig) [][2]string {
	var all [][2]string
	if c.MaxDeliver > 0 {
		all = append(all, [2]string{"T8", fmt.Sprintf("max_deliver is %d, want -1: a message refused that often is skipped silently", c.MaxDeliver)})
	}
	if c.Durable != "" && c.AckPolicy == jetstream.AckNonePolicy {
		all = append(all, [2]string{"T8", "ack_policy is none: what is lost on the way is not sent again"})
	}
	if c.Durable != "" && c.InactiveThreshold > 0 {
		all = append(all, [2]string{"T8", fmt.Sprintf("inactive_threshold is %s, want none: the server would forget how far it has come", c.InactiveThreshold)})
	}
	if c.Durable != "" && c.MemoryStorage {
		all = append(all, [2]string{"T8", "mem_storage is true: a restart of the server forgets how far it has come"})
	}
	return all
}

// older compares versions like 2.15.2; one that cannot be read is not older.
func older(v, than string) bool {
	var a, b [3]int
	if n, _ := fmt.Sscanf(v, "%d.%d.%d", &a[0], &a[1], &a[2]); n < 3 {
		return false
	}
	if n, _ := fmt.Sscanf(than, "%d.%d.%d", &b[0], &b[1], &b[2]); n < 3 {
		return false
	}
	return slices.Compare(a[:], b[:]) < 0
}
