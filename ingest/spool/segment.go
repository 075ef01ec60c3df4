package spool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"github.com/weirhq/weir/schemas"
)

// A segment is a file of records, to which groups of reports are appended:
//
//	record = magic, length, CRC32C of these two, CRC32C of the payload (4 bytes each, little endian), payload
//	payload = 'R', seq (8), requests (8), bytes of boot (1), boot, report as protobuf
//	        | 'C', generation (4), bytes of boot (1), boot
//
// A group is reports and then a commit, written twice. The commit names the generation of counts, of one boot, that is
// in the group: what is in a page of that generation or an older one is in a report. A group at the end of a file
// without a commit was never kept. One that another group follows was, and its commit is damaged.
//
// Both checksums begin with a seed from the file's name, which is random: no text that a caller chose can be taken for
// a record when, behind damage, the next one is looked for.

const (
	magic      = 0x57e1_5eb5
	headBytes  = 16
	maxPayload = 4 << 20

	kindReport = 'R'
	kindCommit = 'C'
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// record is a record as it was read.
type record struct {
	kind       byte
	boot       string
	seq        uint64 // of a report
	requests   uint64
	body       []byte // of a report
	generation uint32 // of a commit
	at         int64  // in the file
	size       int
}

func appendRecord(b []byte, seed uint32, payload func([]byte) []byte) []byte {
	start := len(b)
	b = payload(append(b, make([]byte, headBytes)...))
	head := b[start:]
	binary.LittleEndian.PutUint32(head, magic)
	binary.LittleEndian.PutUint32(head[4:], uint32(len(head)-headBytes))
	binary.LittleEndian.PutUint32(head[8:], crc32.Update(seed, castagnoli, head[:8]))
	binary.LittleEndian.PutUint32(head[12:], crc32.Update(seed, castagnoli, head[headBytes:]))
	return b
}

func appendReport(b []byte, seed uint32, r *schemas.Report) ([]byte, error) {
	body, err := schemas.EncodeReport(r)
	if err != nil {
		return b, err
	}
	if len(body) > maxPayload-256 {
		return b, fmt.Errorf("report %d has %d bytes, want at most %d", r.Seq, len(body), maxPayload-256)
	}
	return appendRecord(b, seed, func(b []byte) []byte {
		b = append(b, kindReport)
		b = binary.LittleEndian.AppendUint64(b, r.Seq)
		b = binary.LittleEndian.AppendUint64(b, r.Requests())
		b = append(b, byte(len(r.Boot)))
		b = append(b, r.Boot...)
		return append(b, body...)
	}), nil
}

func appendCommit(b []byte, seed uint32, boot string, generation uint32) []byte {
	for range 2 {
		b = appendRecord(b, seed, func(b []byte) []byte {
			b = append(b, kindCommit)
			b = binary.LittleEndian.AppendUint32(b, generation)
			b = append(b, byte(len(boot)))
			return append(b, boot...)
		})
	}
	return b
}

var errDamaged = errors.New("damaged")

// parse reads the record at the beginning of b, of which whole says whether its payload is as it was written. An error
// says that there is none.
func parse(b []byte, seed uint32) (r record, whole bool, err error) {
	if len(b) < headBytes || binary.LittleEndian.Uint32(b) != magic || binary.LittleEndian.Uint32(b[8:]) != crc32.Update(seed, castagnoli, b[:8]) {
		return r, false, errDamaged
	}
	n := int(binary.LittleEndian.Uint32(b[4:]))
	if n > maxPayload || len(b) < headBytes+n {
		return r, false, errDamaged
	}
	r.size = headBytes + n
	p := b[headBytes:r.size]
	if binary.LittleEndian.Uint32(b[12:]) != crc32.Update(seed, castagnoli, p) {
		return r, false, nil
	}
	text := func(p []byte) bool {
		if len(p) == 0 || len(p) < 1+int(p[0]) {
			return false
		}
		r.boot, r.body = string(p[1:1+p[0]]), p[1+p[0]:]
		return true
	}
	switch {
	case len(p) > 17 && p[0] == kindReport && text(p[17:]):
		r.kind, r.seq, r.requests = p[0], binary.LittleEndian.Uint64(p[1:]), binary.LittleEndian.Uint64(p[9:])
	case len(p) > 5 && p[0] == kindCommit && text(p[5:]):
		r.kind, r.generation = p[0], binary.LittleEndian.Uint32(p[1:])
	default:
		return r, false, nil
	}
	return r, true, nil
}

// contents are what is kept in a segment.
type contents struct {
	reports []record // without their bodies
	commits []record
	damaged int // records, or runs of bytes that are none
	torn    int // records at the end, of a group that was never kept
}

// scan reads a segment. Damage costs the records that it lies in.
func scan(b []byte, seed uint32) (c contents) {
	var group []record
	broken := 0 // in the group
	committed := false
	for at := 0; at < len(b); {
		r, whole, err := parse(b[at:], seed)
		if err != nil { // look for the next one
			for at++; at < len(b); at++ {
				if _, whole, err = parse(b[at:], seed); err == nil && whole {
					break
				}
			}
			if at == len(b) {
				c.torn++
			} else {
				broken++
			}
			continue
		}
		if !whole {
			broken++
			at += r.size
			continue
		}
		r.at, r.body = int64(at), nil
		at += r.size
		if r.kind == kindCommit {
			if !committed {
				c.commits = append(c.commits, r)
			}
			committed = true
			c.reports, c.damaged = append(c.reports, group...), c.damaged+broken
			group, broken = nil, 0
			continue
		}
		committed = false
		group = append(group, r) // behind one whose commits are damaged, the next commit keeps both
	}
	c.torn += len(group)
	return c
}

// readReport reads the report at a place that scan has found, or append made.
func readReport(f io.ReaderAt, seed uint32, at int64, size int) (*schemas.Report, error) {
	b := make([]byte, size)
	if _, err := f.ReadAt(b, at); err != nil {
		return nil, err
	}
	rec, whole, err := parse(b, seed)
	if err != nil || !whole || rec.kind != kindReport {
		return nil, errDamaged
	}
	return decodeReport(rec)
}

func decodeReport(rec record) (*schemas.Report, error) { return schemas.DecodeSealed(rec.body) }

// create makes a file that is not there yet, and sees to it that its name outlives a power cut.
func create(name, dir string) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syncDir(dir); err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(name))
	}
	return f, nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
