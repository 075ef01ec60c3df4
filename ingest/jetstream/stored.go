package jetstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/schemas"
)

// Stored returns what the history has of this gateway's reports: nothing while no history has written anything.
func (p *Publisher) Stored(ctx context.Context) (schemas.Floor, *schemas.Stored, error) {
	floor, stored, err := p.readStored(ctx)
	if err == nil {
		floor.Lost, err = p.losses(ctx)
	}
	if err != nil {
		return schemas.Floor{}, nil, fmt.Errorf("read what is stored of %s: %w", p.subject, err)
	}
	return floor, stored, nil
}

func (p *Publisher) readStored(ctx context.Context) (floor schemas.Floor, stored *schemas.Stored, err error) {
	stored = &schemas.Stored{}
	kv, err := p.js.KeyValue(ctx, schemas.StoredBucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return floor, stored, nil
	}
	if err != nil {
		return floor, nil, err
	}
	// The floor first: what was written before it is then in what is read after it.
	if b, err := value(ctx, kv, schemas.FloorKey); err != nil {
		return floor, nil, err
	} else if b != nil {
		if err := json.Unmarshal(b, &floor); err != nil {
			return floor, nil, err
		}
	}
	b, err := value(ctx, kv, schemas.StoredPrefix+p.gateway)
	if err != nil {
		return floor, nil, err
	}
	if b != nil {
		stored, err = schemas.DecodeStored(b)
	}
	return floor, stored, err
}

// value is nil when there is none.
func value(ctx context.Context, kv jetstream.KeyValue, key string) ([]byte, error) {
	entry, err := kv.Get(ctx, key)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return entry.Value(), nil
}

// Bounds of what is told to one gateway. A report that is not in it is sent again, found to be stored, and in it then. Lives that crash one
// after the other while NATS is away are delivered at once, and each needs its place: a boot is 50 bytes of what is written with every batch.
const (
	maxBoots  = 64
	maxRanges = 256
)

// Marks tells the gateways which of their reports the history has. One process at a time writes, as with Ledger.
type Marks struct {
	nc      *nats.Conn
	js      jetstream.JetStream
	declare func(context.Context) error
	log     *slog.Logger
	signal  chan struct{}

	mu       sync.Mutex                 // the fields below
	gateways map[string]*schemas.Stored // what was written, as far as it is known, and what is to be
	recent   map[string][]string        // boots of a gateway, the one heard of last at the end
	dirty    map[string]bool            // gateways with something to be written
	floor    schemas.Floor
}

// NewMarks returns marks that nobody has told anything. declare makes the bucket when it is gone; it may be nil.
func NewMarks(nc *nats.Conn, declare func(context.Context) error, log *slog.Logger) (*Marks, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("marks of stored reports: %w", err)
	}
	return &Marks{nc: nc, js: js, declare: declare, log: log, signal: make(chan struct{}, 1),
		gateways: map[string]*schemas.Stored{}, recent: map[string][]string{}, dirty: map[string]bool{}}, nil
}

// After returns a handler that calls store and marks the reports of each batch that it has stored. A report that store
// refuses for good is not among them: it is marked by Settled, once it is a dead letter. The gateways are told by Settled.
func (k *Marks) After(store func(context.Context, schemas.Batch[*schemas.Report]) error) func(context.Context, schemas.Batch[*schemas.Report]) error {
	return func(ctx context.Context, b schemas.Batch[*schemas.Report]) error {
		err := store(ctx, b)
		var not schemas.Refused
		if err != nil && !errors.As(err, &not) {
			return err
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		for i := range b.Items {
			it := &b.Items[i]
			if !slices.ContainsFunc(not, func(r schemas.RefusedMessage) bool { return r.Seq == it.Seq }) {
				k.add(it.Value.Gateway, it.Value.Boot, it.Value.Seq)
			}
		}
		return err
	}
}

// Settled is for a Ledger's Config. It marks the reports that are dead letters: their gateways need not keep them, and
// would send them again and again. What a letter holds comes back by being replayed. Whose a letter is its subject says.
func (k *Marks) Settled(stream string, last uint64, buried []Buried) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, b := range buried {
		if gateway, err := schemas.Gateway(schemas.UsagePrefix, b.Subject); err == nil && b.Seq > 0 && b.Seq <= schemas.MaxCount && schemas.ValidName(b.Boot) == nil {
			k.add(gateway, b.Boot, b.Seq)
		}
	}
	k.floor = schemas.Floor{Stream: stream, Seq: last}
	select {
	case k.signal <- struct{}{}:
	default:
	}
}

// add marks a report. mu is held.
func (k *Marks) add(gateway, boot string, seq uint64) {
	s := k.gateways[gateway]
	if s == nil {
		s = &schemas.Stored{Boots: map[string]schemas.Ranges{}}
		k.gateways[gateway] = s
	}
	k.dirty[gateway] = true
	ranges, _ := s.Boots[boot].Add(seq)
	if n := len(ranges) - maxRanges; n > 0 {
		ranges = slices.Delete(ranges, 0, n)
	}
	s.Boots[boot] = ranges
	recent := k.recent[gateway]
	if n := len(recent); n > 0 && recent[n-1] == boot {
		return
	}
	recent = append(slices.DeleteFunc(recent, func(b string) bool { return b == boot }), boot)
	if len(recent) > maxBoots {
		delete(s.Boots, recent[0])
		recent = recent[1:]
	}
	k.recent[gateway] = recent
}

// Run writes what is marked, until ctx is done. What cannot be written is tried again; history does not wait for it.
func (k *Marks) Run(ctx context.Context) error {
	known := map[string]bool{} // gateways whose entry was read
	failing := false
	for {
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			defer cancel()
			_ = k.write(last, known) // at best: a gateway that is not told sends again
			return nil
		case <-k.signal:
		}
		for {
			err := k.write(ctx, known)
			if err == nil {
				failing = false
				break
			}
			if ctx.Err() != nil {
				break
			}
			if !failing {
				failing = true
				k.log.Warn("gateways are not told what is stored, they keep it", "err", err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			if ctx.Err() != nil {
				break
			}
		}
	}
}

// write tells each gateway that has something new, and then all of them the floor.
func (k *Marks) write(ctx context.Context, known map[string]bool) error {
	k.mu.Lock()
	dirty, floor := k.dirty, k.floor
	k.dirty = map[string]bool{}
	k.mu.Unlock()
	if floor.Stream == "" {
		return nil
	}
	again := func(err error) error {
		k.mu.Lock()
		defer k.mu.Unlock()
		for g := range dirty {
			k.dirty[g] = true
		}
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	kv, err := k.js.KeyValue(ctx, schemas.StoredBucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) && k.declare != nil {
		clear(known)
		if err = k.declare(ctx); err == nil {
			kv, err = k.js.KeyValue(ctx, schemas.StoredBucket)
		}
	}
	if err != nil {
		return again(fmt.Errorf("bucket %s: %w", schemas.StoredBucket, err))
	}
	for g := range dirty {
		if !known[g] {
			if err := k.read(ctx, kv, g); err != nil {
				return again(err)
			}
			known[g] = true
		}
		k.mu.Lock()
		b, err := json.Marshal(k.gateways[g])
		k.mu.Unlock()
		if err != nil {
			return again(err)
		}
		if _, err := kv.Put(ctx, schemas.StoredPrefix+g, b); err != nil {
			return again(fmt.Errorf("write what is stored of %s: %w", g, err))
		}
	}
	b, err := json.Marshal(floor)
	if err != nil {
		return again(err)
	}
	if _, err := kv.Put(ctx, schemas.FloorKey, b); err != nil {
		return again(fmt.Errorf("write how far the history has come: %w", err))
	}
	return nil
}

// read adds what a predecessor has written.
func (k *Marks) read(ctx context.Context, kv jetstream.KeyValue, gateway string) error {
	b, err := value(ctx, kv, schemas.StoredPrefix+gateway)
	if err != nil {
		return fmt.Errorf("read what is stored of %s: %w", gateway, err)
	}
	if b == nil {
		return nil
	}
	old, err := schemas.DecodeStored(b)
	if err != nil {
		k.log.Error("what was written about stored reports cannot be read, beginning anew", "gateway", gateway, "err", err)
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	s := k.gateways[gateway]
	for boot, ranges := range old.Boots {
		if len(s.Boots) >= maxBoots && s.Boots[boot] == nil {
			continue
		}
		if s.Boots[boot] == nil {
			k.recent[gateway] = append([]string{boot}, k.recent[gateway]...)
		}
		for _, e := range s.Boots[boot] { // few and short: what came since we started
			for n := e[0]; n <= e[1]; n++ {
				ranges, _ = ranges.Add(n)
			}
		}
		s.Boots[boot] = ranges
	}
	return nil
}
