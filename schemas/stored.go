package schemas

import (
	"encoding/json"
	"fmt"
	"slices"
)

// Keys of the bucket weir-stored, in which the history says what it has. A gateway's name has no dot, so the two kinds
// never meet. FloorKey is written after the gateways' keys and read before them.
const (
	StoredBucket = "weir-stored"
	FloorKey     = "history.floor"
	StoredPrefix = "gateway."
)

// Stored is what the history has of one gateway's reports. It may come late; what it says stays true.
type Stored struct {
	Boots map[string]Ranges `json:"boots"` // sequence numbers of reports by boot
}

// Has reports whether the history has report seq of boot.
func (s *Stored) Has(boot string, seq uint64) bool { return s.Boots[boot].Has(seq) }

// Floor says how far the history has come in one life of the stream: all of it up to Seq is stored. Lost is the gateway's own: how often it
// has found that the stream no longer had what it had taken from it.
type Floor struct {
	Stream string `json:"stream"` // as in Batch
	Seq    uint64 `json:"seq"`
	Lost   uint64 `json:"-"`
}

// Ranges are numbers, as ascending ranges that neither touch nor overlap.
type Ranges [][2]uint64 // first and last, both included

// Has reports whether n is one of the numbers.
func (r Ranges) Has(n uint64) bool {
	i, _ := slices.BinarySearchFunc(r, n, func(e [2]uint64, n uint64) int {
		if e[1] < n {
			return -1
		}
		return 1
	})
	return i < len(r) && r[i][0] <= n
}

// Add returns the numbers with n, and says whether n is new.
func (r Ranges) Add(n uint64) (Ranges, bool) {
	i, _ := slices.BinarySearchFunc(r, n, func(e [2]uint64, n uint64) int {
		if e[1] < n {
			return -1
		}
		return 1
	})
	if i < len(r) && r[i][0] <= n {
		return r, false
	}
	before, after := i > 0 && r[i-1][1]+1 == n, i < len(r) && n+1 == r[i][0]
	switch {
	case before && after:
		r[i-1][1] = r[i][1]
		return slices.Delete(r, i, i+1), true
	case before:
		r[i-1][1] = n
	case after:
		r[i][0] = n
	default:
		r = slices.Insert(r, i, [2]uint64{n, n})
	}
	return r, true
}

// DecodeStored reads a Stored. Ranges that are not in order are an error.
func DecodeStored(b []byte) (*Stored, error) {
	var s Stored
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("decode what is stored: %w", err)
	}
	for boot, ranges := range s.Boots {
		var last uint64
		for _, e := range ranges {
			if e[0] <= last || e[1] < e[0] {
				return nil, fmt.Errorf("decode what is stored: ranges of boot %.80q are not in order", boot)
			}
			last = e[1]
		}
	}
	return &s, nil
}
