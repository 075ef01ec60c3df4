package spool

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/weirhq/weir/ingest"
	"github.com/weirhq/weir/schemas"
)

// The live file of a boot holds the counts that are not sealed yet, mapped into memory and shared with the kernel: they
// are there when the process is killed, at any instruction, and no system call is made for a count.
//
//	file   = header (16 KiB, of which two copies of 128 bytes and six words are used), chunks of 16 KiB
//	chunk  = generation and bytes used (one word, written last), entries
//	entry  = ingest.Cell (32 bytes), generation (4), checksum (4), lengths of four texts (2 each), texts, padding to 8
//
// A chunk belongs to one lane and one generation. When the generation is sealed, the word becomes 0, and the chunk is
// free. The checksum is over all but the Cell and begins with a seed from the header, which is random: after a power cut
// a chunk may be put together from several times, and what a caller chose must not pass for an entry.

const (
	liveMagic   = "weirliv1" // the last one is the version
	chunkBytes  = 16 << 10
	chunkHead   = 16
	slabBytes   = 1 << 20 // the file grows by so much
	entryBytes  = 48
	headerCopy  = 128
	lastSeqAt   = 4096 // the word for the last sequence number of the boot
	heldSeqAt   = 4104 // that of its last report that never was on disk
	heldGenAt   = 4112 // and for the generation of counts which that one told
	madeAt      = 4120 // how long the file has been; 0 in files of before this was written down
	segAt       = 4128 // the file of reports that was written last: see segmentMark; 0 is none
	segEndAt    = 4136 // and where its last commit ends
	maxLane     = 64
	reserveFree = 96 // chunks that should be free, so that no request has to make the file longer
)

const cellBytes = int(unsafe.Sizeof(ingest.Cell{}))

// live is the memory of one boot's counts.
type live struct {
	dir, boot, kernel string
	seed              uint32
	most              int64 // bytes of the file
	syncHeader        func(mapped []byte) error

	lanes [maxLane]struct {
		chunk []byte // being filled
		used  int
		gen   uint32
		_     [24]byte
	}

	growing sync.Mutex // the fields below; before mu, and held while the disk is asked
	f       *os.File   // nil while it cannot be made
	size    int64

	mu       sync.Mutex // the fields below
	header   []byte     // mapped
	lastSeq  uint64
	held     bootKnown
	seg      uint64   // mark of the file of the last commit
	segEnd   int64    // where that commit ends
	free     [][]byte // chunks
	taken    map[uint32][][]byte
	gone     map[uint32][][]byte       // the same, of files before this one
	volatile map[uint32][]*ingest.Cell // those that did not fit, by generation
	err      error                     // the last one of growing
}

// liveName is the file of a boot, which is a valid name.
func liveName(dir, boot string) string { return filepath.Join(dir, "live-"+boot) }

func bootOf(name string) (boot string, ok bool) {
	return strings.CutPrefix(filepath.Base(name), "live-")
}

// bootSum stands for a boot in the header: a copy of a file under another name is not one of another boot.
func bootSum(boot string) []byte {
	sum := sha256.Sum256([]byte(boot))
	return sum[:]
}

// errNone says that a file only has a name like one of ours.
var errNone = errors.New("it is none of ours")

// open makes the file. Its caller holds growing.
func (l *live) open() error {
	name := liveName(l.dir, l.boot)
	block := make([]byte, chunkBytes)
	h := block[:headerCopy]
	copy(h, liveMagic)
	binary.LittleEndian.PutUint32(h[8:], l.seed)
	copy(h[16:80], l.kernel)
	copy(h[80:112], bootSum(l.boot))
	binary.LittleEndian.PutUint32(h[124:], crc32.Checksum(h[:124], castagnoli))
	copy(block[2048:], h)
	f, err := create(name, func(f *os.File) error {
		_, err := f.Write(block)
		return err
	})
	if err != nil {
		return err
	}
	header, err := syscall.Mmap(int(f.Fd()), 0, chunkBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return errors.Join(fmt.Errorf("map %s: %w", name, err), f.Close(), os.Remove(name))
	}
	l.f, l.size = f, chunkBytes
	l.mu.Lock()
	defer l.mu.Unlock()
	l.header = header
	l.writeSeqs()
	return nil
}

// word is eight bytes of a mapping.
func word(b []byte) *uint64 { return (*uint64)(unsafe.Pointer(&b[0])) }

// grow makes the file longer by a slab. Every byte is written, for a page without a block on a full disk would be a
// SIGBUS in the middle of a request. Its caller holds growing.
func (l *live) grow() error {
	if l.f == nil {
		if err := l.open(); err != nil {
			return err
		}
	}
	if l.size+slabBytes > l.most {
		return fmt.Errorf("%s has %d bytes, want at most %d", l.f.Name(), l.size, l.most)
	}
	if _, err := l.f.WriteAt(make([]byte, slabBytes), l.size); err != nil {
		return errors.Join(err, l.f.Truncate(l.size)) // a part of a slab serves nobody
	}
	slab, err := syscall.Mmap(int(l.f.Fd()), l.size, slabBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map %s: %w", l.f.Name(), err)
	}
	l.size += slabBytes
	chunks := make([][]byte, 0, slabBytes/chunkBytes)
	for at := 0; at < slabBytes; at += chunkBytes {
		chunk := slab[at : at+chunkBytes : at+chunkBytes]
		for i := 0; i < chunkBytes; i += 4096 {
			_ = *(*byte)(unsafe.Pointer(&chunk[i])) // map it now, not in a request
		}
		chunks = append(chunks, chunk)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	atomic.StoreUint64(word(l.header[madeAt:]), uint64(l.size)) // before there is a count in it
	l.free = append(l.free, chunks...)
	return nil
}

// reserve sees to it that there is memory for a while, whatever growing has failed at before. It returns its error.
func (l *live) reserve() error {
	l.mu.Lock()
	l.err = nil
	l.mu.Unlock()
	return l.want(reserveFree)
}

// want grows until so many chunks are free. After an error it tries no more.
func (l *live) want(chunks int) error {
	l.growing.Lock()
	defer l.growing.Unlock()
	for {
		l.mu.Lock()
		n, err := len(l.free), l.err
		l.mu.Unlock()
		if n >= chunks || err != nil {
			return err
		}
		if err = l.grow(); err != nil {
			l.mu.Lock()
			l.err = err
			l.mu.Unlock()
		}
	}
}

// inPlace says that the file is in the folder, or that there is none.
func (l *live) inPlace() bool {
	l.growing.Lock()
	defer l.growing.Unlock()
	return l.f == nil || inPlace(l.f)
}

// renew has another file made, when this one is not in the folder any more. Counts that are in it stay there until they are sealed.
func (l *live) renew() {
	l.growing.Lock()
	defer l.growing.Unlock()
	_ = l.f.Close() // what is mapped stays
	l.mu.Lock()
	defer l.mu.Unlock()
	l.f, l.size, l.header, l.free = nil, 0, nil, nil
	for g, chunks := range l.taken {
		l.gone[g] = append(l.gone[g], chunks...)
	}
	clear(l.taken)
}

// close lets go of the file. What is mapped stays.
func (l *live) close() error {
	l.growing.Lock()
	defer l.growing.Unlock()
	if l.f == nil {
		return nil
	}
	return l.f.Close()
}

// cell returns memory for a count. When there is no room left it is of this process only.
func (l *live) cell(lane int, gen uint32, first int64, texts [4]string) *ingest.Cell {
	need := entryBytes + len(texts[0]) + len(texts[1]) + len(texts[2]) + len(texts[3])
	need = (need + 7) &^ 7
	s := &l.lanes[lane]
	if s.gen != gen || s.used+need > len(s.chunk) {
		if s.chunk, s.gen, s.used = l.take(gen), gen, chunkHead; s.chunk == nil {
			c := &ingest.Cell{}
			c.Begin(first)
			l.mu.Lock()
			defer l.mu.Unlock()
			l.volatile[gen] = append(l.volatile[gen], c)
			return c
		}
	}
	e := s.chunk[s.used : s.used+need]
	c := (*ingest.Cell)(unsafe.Pointer(&e[0]))
	c.Begin(first)
	binary.LittleEndian.PutUint32(e[cellBytes:], gen)
	at := entryBytes
	for i, t := range texts {
		binary.LittleEndian.PutUint16(e[40+2*i:], uint16(len(t)))
		at += copy(e[at:], t)
	}
	binary.LittleEndian.PutUint32(e[36:], l.sum(e[:at]))
	s.used += need
	atomic.StoreUint64(word(s.chunk), uint64(gen)<<32|uint64(s.used))
	return c
}

// sum is the checksum of an entry.
func (l *live) sum(e []byte) uint32 { return entrySum(l.seed, e) }

func entrySum(seed uint32, e []byte) uint32 {
	return crc32.Update(crc32.Update(seed, castagnoli, e[cellBytes:36]), castagnoli, e[40:])
}

func (l *live) take(gen uint32) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.free) == 0 && l.err == nil {
		l.mu.Unlock()
		_ = l.want(1) // it tells its error to reserve
		l.mu.Lock()
	}
	n := len(l.free)
	if n == 0 {
		return nil
	}
	chunk := l.free[n-1]
	l.free = l.free[:n-1]
	l.taken[gen] = append(l.taken[gen], chunk)
	return chunk
}

// forget frees the chunks up to a generation.
func (l *live) forget(gen uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for g, chunks := range l.taken {
		if g > gen {
			continue
		}
		for _, c := range chunks {
			atomic.StoreUint64(word(c), 0)
		}
		l.free = append(l.free, chunks...)
		delete(l.taken, g)
	}
	for g, chunks := range l.gone {
		if g > gen {
			continue
		}
		for _, c := range chunks { // a file that was moved away may come back
			atomic.StoreUint64(word(c), 0)
		}
		delete(l.gone, g)
	}
	for g := range l.volatile {
		if g <= gen {
			delete(l.volatile, g)
		}
	}
}

// inMemory is the number of requests in cells that are not in the file, or in one that is not in the folder any more. Nobody may be counting.
func (l *live) inMemory() (requests uint64) {
	inPlace := l.inPlace()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, cells := range l.volatile {
		for _, c := range cells {
			n, _, _ := c.Read()
			requests += n
		}
	}
	lost := slices.Collect(maps.Values(l.gone))
	if !inPlace {
		lost = slices.AppendSeq(lost, maps.Values(l.taken))
	}
	for _, chunk := range slices.Concat(lost...) {
		used := int(uint32(atomic.LoadUint64(word(chunk))))
		for at := chunkHead; at < used; {
			n, _, _ := (*ingest.Cell)(unsafe.Pointer(&chunk[at])).Read()
			requests += n
			_, end := textsOf(chunk[at:used])
			at += (end + 7) &^ 7
		}
	}
	return requests
}

// textsOf reads the texts of the entry that e begins with, and where they end; that is beyond e where they are damaged.
func textsOf(e []byte) (texts [4]string, end int) {
	end = entryBytes
	for i := range texts {
		n := int(binary.LittleEndian.Uint16(e[40+2*i:]))
		if end+n > len(e) {
			return texts, len(e) + 1
		}
		texts[i] = string(e[end : end+n])
		end += n
	}
	return texts, end
}

// setLastSeq writes down the number of the boot's last report.
func (l *live) setLastSeq(seq uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lastSeq = seq
	l.writeSeqs()
}

// segmentMark stands for a file of reports. Numbers of files come again, seeds do not.
func segmentMark(seed uint32) uint64 { return 1<<32 | uint64(seed) }

// setSegment writes down how far a file of reports is written.
func (l *live) setSegment(seed uint32, end int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seg, l.segEnd = segmentMark(seed), end
	l.writeSeqs()
}

// setHeld writes down the last report and the generation of a group that never will be on disk, so that the next life neither finds
// these counts nor gives that number away. Without an error this outlives a power cut.
func (l *live) setHeld(k bootKnown) error {
	l.mu.Lock()
	l.held = k
	l.writeSeqs()
	header := l.header
	l.mu.Unlock()
	if header == nil { // and no counts are on disk
		return nil
	}
	return l.syncHeader(header)
}

func (l *live) writeSeqs() {
	if l.header != nil {
		atomic.StoreUint64(word(l.header[lastSeqAt:]), l.lastSeq)
		atomic.StoreUint64(word(l.header[heldSeqAt:]), l.held.seq)
		atomic.StoreUint64(word(l.header[heldGenAt:]), uint64(l.held.sealed))
		if seg := word(l.header[segAt:]); atomic.LoadUint64(seg) != l.seg { // a kill in between must not give one file the end of another
			atomic.StoreUint64(word(l.header[segEndAt:]), 0)
			atomic.StoreUint64(seg, l.seg)
		}
		atomic.StoreUint64(word(l.header[segEndAt:]), uint64(l.segEnd))
	}
}

// dead is the live file of a boot that has ended.
type dead struct {
	boot    string
	kernel  string // the life of the machine that it is of
	lastSeq uint64
	held    bootKnown
	made    uint64 // bytes that the file has had; 0 is not known
	seg     uint64 // mark of the file of reports that its life wrote last
	segEnd  uint64 // bytes that this one had
	seed    uint32
	f       *os.File
}

func openDead(name string) (*dead, error) {
	boot, _ := bootOf(strings.TrimPrefix(filepath.Base(name), aside))
	if err := schemas.ValidName(boot); err != nil {
		return nil, fmt.Errorf("%w: %w", errNone, err)
	}
	if !maybeFile(name) {
		return nil, fmt.Errorf("%w: it is no file", errNone)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	block := make([]byte, chunkBytes)
	if _, err := io.ReadFull(f, block); err != nil {
		return nil, errors.Join(errDamaged, f.Close())
	}
	for at := 0; at <= 2048; at += 2048 {
		h := block[at : at+headerCopy]
		if string(h[:7]) != liveMagic[:7] || binary.LittleEndian.Uint32(h[124:]) != crc32.Checksum(h[:124], castagnoli) {
			continue
		}
		if h[7] != liveMagic[7] {
			return nil, errors.Join(fmt.Errorf("%w: version %c, want %c", errNewer, h[7], liveMagic[7]), f.Close())
		}
		if sum := h[80:112]; !zeros(sum) && !bytes.Equal(sum, bootSum(boot)) { // zeros: made before this was written down
			return nil, errors.Join(fmt.Errorf("%w: its counts are of another life than its name says", errNone), f.Close())
		}
		return &dead{boot: boot, kernel: strings.TrimRight(string(h[16:80]), "\x00"), seed: binary.LittleEndian.Uint32(h[8:]),
			lastSeq: binary.LittleEndian.Uint64(block[lastSeqAt:]), made: binary.LittleEndian.Uint64(block[madeAt:]), f: f,
			seg: binary.LittleEndian.Uint64(block[segAt:]), segEnd: binary.LittleEndian.Uint64(block[segEndAt:]),
			held: bootKnown{uint32(binary.LittleEndian.Uint64(block[heldGenAt:])), binary.LittleEndian.Uint64(block[heldSeqAt:])}}, nil
	}
	return nil, errors.Join(errDamaged, f.Close())
}

// each calls f with every count of a generation above sealed, and returns the number of entries that are damaged, and one more where the
// end of the file is missing. After a power cut that may be so because the header was written and the rest not yet: no less is lost.
func (d *dead) each(sealed uint32, f func(generation uint32, c *ingest.Cell, texts [4]string)) (damaged int, err error) {
	block := make([]byte, chunkBytes)
	for at, ended := int64(chunkBytes), false; !ended; at += chunkBytes {
		n, err := d.f.ReadAt(block, at)
		ended = errors.Is(err, io.EOF)
		if err != nil && !ended {
			return damaged, err
		}
		if ended && uint64(at)+uint64(n) < d.made { // what is behind made is a slab that was being made, and has no counts
			damaged++
		}
		chunk := block[:n]
		if n < chunkHead {
			continue
		}
		w := binary.LittleEndian.Uint64(chunk)
		gen, used := uint32(w>>32), int(uint32(w))
		if w == 0 || gen <= sealed {
			continue
		}
		for at := chunkHead; at < used; {
			whole := min(used, n)
			if used > chunkBytes || whole < at+entryBytes {
				damaged++
				break
			}
			e := chunk[at:whole]
			texts, end := textsOf(e)
			if end > len(e) || binary.LittleEndian.Uint32(e[36:]) != entrySum(d.seed, e[:end]) || binary.LittleEndian.Uint32(e[cellBytes:]) != gen {
				damaged++ // and there is no way to the next one
				break
			}
			c := (*ingest.Cell)(unsafe.Pointer(&e[0]))
			if n, _, _ := c.Read(); n > 0 {
				f(gen, c, texts)
			}
			at += (end + 7) &^ 7
		}
	}
	return damaged, nil
}
