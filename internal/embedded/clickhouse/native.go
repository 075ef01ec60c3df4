package clickhouse

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/ClickHouse/ch-go/compress"
	chproto "github.com/ClickHouse/ch-go/proto"
	"github.com/ClickHouse/clickhouse-go/v2/lib/column"
	"github.com/ClickHouse/clickhouse-go/v2/lib/proto"
)

// recode turns Native blocks of revision 0, all that the engine can write, into those of the client's protocol
// revision: a ClickHouse server does the same for a client that sends client_protocol_version.
func recode(data []byte, revision uint64) ([]byte, error) {
	if revision == 0 || len(data) == 0 {
		return data, nil
	}
	in := chproto.NewReader(bytes.NewReader(data))
	out := &chproto.Buffer{Buf: make([]byte, 0, len(data)+1024)}
	for {
		block := proto.Block{ServerContext: &column.ServerContext{}}
		if err := block.Decode(in, 0); errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return out.Buf, nil
		} else if err != nil {
			return nil, fmt.Errorf("re-encode Native: %w", err)
		}
		if err := block.Encode(out, revision); err != nil {
			return nil, fmt.Errorf("re-encode Native: %w", err)
		}
	}
}

// squeeze is ClickHouse's own framing of compressed data, asked for by compress=1.
func squeeze(data []byte, method compress.Method) ([]byte, error) {
	const frame = 1 << 20
	w := compress.NewWriter(compress.LevelZero, method)
	var out []byte
	for len(data) > 0 {
		n := min(len(data), frame)
		if err := w.Compress(data[:n]); err != nil {
			return nil, err
		}
		out, data = append(out, w.Data...), data[n:]
	}
	return out, nil
}

// unsqueeze reads what squeeze makes, to the end.
func unsqueeze(r io.Reader) ([]byte, error) {
	var out []byte
	for cr := compress.NewReader(r); ; {
		buf := make([]byte, 64<<10)
		n, err := cr.Read(buf)
		out = append(out, buf[:n]...)
		if errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return out, nil
		} else if err != nil {
			return nil, err
		}
	}
}
