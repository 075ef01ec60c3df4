package schemas

import "time"

// Batch is a run of a stream: every message from First to Last, the ones that could not be read left out (they are in
// the dead-letter stream). First and Last name the same messages for ever.
type Batch[T any] struct {
	Stream      string // one life of a stream: another one that is made under the same name is called differently here
	First, Last uint64 // stream sequence numbers, both included
	Items       []Delivered[T]
}

// Delivered is a message as the stream holds it.
type Delivered[T any] struct {
	Seq     uint64    // in the stream
	Arrived time.Time // by the stream's clock
	Value   T
}
