package spool

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/weirhq/weir/schemas"
)

// A segment is a file of records, to which groups of reports are appended:
//
//	file   = header (16 bytes: "weirseg\n", version (4), CRC32C of these), records
//	record = magic, length, CRC32C of these two, CRC32C of the payload (4 bytes each, little endian), payload
//	payload = 'R', seq (8), requests (8), bytes of boot (1), boot, report as protobuf
//	        | 'C', generation (4), bytes of boot (1), boot
//
// A group is reports and then a commit, written twice. The commit names the generation of counts, of one boot, that is
// in the group: what is in a page of that generation or an older one is in a report. A group at the end of a file
// without a commit was never kept, unless the file was cut off: see Spool.ordinary. One that another group follows was, and
// its commit is damaged.
//
// Both checksums begin with a seed from the file's name, which is random: no text that a caller chose can be taken for
// a record when, behind damage, the next one is looked for.

const (
	segMagic   = "weirseg\n"
	version    = 1 // of the records
	segHead    = 16
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

// errNewer says that another weir wrote a file, one that knows more.
var errNewer = errors.New("a newer weir wrote it")

func appendHeader(b []byte) []byte {
	start := len(b)
	b = binary.LittleEndian.AppendUint32(append(b, segMagic...), version)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:], castagnoli))
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
	damage  []span // records, or runs of bytes that are none
	end     int64  // of the last commit, or of the header

	// Behind it:
	tail []record // whole reports, of a group without a commit
	torn span     // bytes that are no whole record
	cut  bool     // torn is nothing, the beginning of a record, or zeros
}

// span is a run of bytes in a file.
type span struct{ at, size int64 }

// scan reads a segment. Damage costs the records that it lies in. errNewer says that the file is none for us.
func scan(b []byte, seed uint32) (c contents, err error) {
	at := segHead
	switch header := b[:min(len(b), segHead)]; {
	case len(header) == segHead && string(header[:8]) == segMagic && binary.LittleEndian.Uint32(header[12:]) == crc32.Checksum(header[:12], castagnoli):
		if v := binary.LittleEndian.Uint32(header[8:]); v != version {
			return c, fmt.Errorf("%w: version %d, want %d", errNewer, v, version)
		}
	case len(header) < segHead: // create makes none
		c.torn, c.cut = span{0, int64(len(b))}, true
		return c, nil
	default:
		if _, whole, err := parse(b, seed); err == nil && whole { // made before files had a header
			at = 0
			break
		}
		at = len(header)
		c.damage = append(c.damage, span{0, int64(at)})
	}
	c.end, c.cut = int64(at), true
	var group []record
	var broken []span // in the group
	committed := false
	for at < len(b) {
		r, whole, err := parse(b[at:], seed)
		if err != nil { // look for the next one
			bad := at
			for at++; at < len(b); at++ {
				if _, whole, err = parse(b[at:], seed); err == nil && whole {
					break
				}
			}
			run := span{int64(bad), int64(at - bad)}
			if at == len(b) {
				c.torn, c.cut = run, begins(b[bad:], seed) && len(broken) == 0
			} else {
				broken = append(broken, run)
			}
			continue
		}
		if !whole {
			broken = append(broken, span{int64(at), int64(r.size)})
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
			c.reports, c.damage = append(c.reports, group...), append(c.damage, broken...)
			group, broken, c.end = nil, nil, int64(at)
			continue
		}
		committed = false
		group = append(group, r) // behind one whose commits are damaged, the next commit keeps both
	}
	c.tail = group
	if len(broken) > 0 { // the system may have written a later page and not this one
		c.damage, c.cut = append(c.damage, broken...), false
	}
	return c, nil
}

// begins says whether b is the beginning of a record that goes on beyond it, or nothing was written there.
func begins(b []byte, seed uint32) bool {
	var want [4]byte
	binary.LittleEndian.PutUint32(want[:], magic)
	if len(b) < headBytes {
		return bytes.HasPrefix(b, want[:min(len(b), 4)]) || zeros(b)
	}
	if binary.LittleEndian.Uint32(b) != magic || binary.LittleEndian.Uint32(b[8:]) != crc32.Update(seed, castagnoli, b[:8]) {
		return zeros(b)
	}
	return len(b) < headBytes+int(binary.LittleEndian.Uint32(b[4:]))
}

func zeros(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

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

// making is before the name of a file that create is at.
const making = "new-"

// create makes a file that begins with what fill writes. It has its name when all of that is on disk, and keeps it over a power cut: no
// crash leaves one that is empty, or without its header.
func create(name string, fill func(*os.File) error) (f *os.File, err error) {
	dir, base := filepath.Split(name)
	being := filepath.Join(dir, making+strings.TrimSuffix(base, ".seg"))
	if f, err = os.OpenFile(being, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600); err != nil {
		return nil, err
	}
	if err = fill(f); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(being, name)
	}
	if err != nil {
		return nil, errors.Join(err, os.Remove(being))
	}
	if err = syncDir(dir); err == nil {
		f, err = os.OpenFile(name, os.O_RDWR, 0)
	}
	if err != nil {
		return nil, errors.Join(err, os.Remove(name))
	}
	if _, err = f.Seek(0, io.SeekEnd); err != nil {
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
