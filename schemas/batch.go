package schemas

import (
	"fmt"
	"time"
)

// Batch is a run of a stream: every message from First to Last, the ones that could not be read left out (they are in
// the dead-letter stream). First and Last name the same messages for ever.
type Batch[T any] struct {
	Stream      string // one life of a stream: another one that is made under the same name is called differently here
	First, Last uint64 // stream sequence numbers, both included
	Waiting     uint64 // messages that were in the stream behind it already; 0 where nobody knows
	Items       []Delivered[T]
}

// Delivered is a message as the stream holds it.
type Delivered[T any] struct {
	Seq     uint64    // in the stream
	Arrived time.Time // by the stream's clock
	Value   T
}

// Refused is the error of a store that has taken a whole batch but for these messages, which it would refuse again.
type Refused []RefusedMessage

// RefusedMessage is one message that a store would refuse again.
type RefusedMessage struct {
	Seq    uint64 // in the stream
	Detail string // the store's words
}

func (r Refused) Error() string {
	return fmt.Sprintf("%d messages are refused, the first is %d: %s", len(r), r[0].Seq, r[0].Detail)
}
