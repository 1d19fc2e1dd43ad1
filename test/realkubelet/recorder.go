package realkubelet

import (
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	_ "k8s.io/cri-api/pkg/apis/runtime/v1" // registers the messages
)

// Call is one call and its answer. Messages are as protobuf's JSON has them,
// decoded.
type Call struct {
	// Method is the service's short name and the method: ImageService/PullImage.
	Method  string `json:"method"`
	Request any    `json:"request"`
	Answer  any    `json:"answer,omitempty"`
	// Error is gRPC's code and message, where there is no answer.
	Error string `json:"error,omitempty"`
}

// Recorder passes calls on and keeps them.
type Recorder struct {
	mu    sync.Mutex
	calls []Call
}

// Calls are those that have ended so far, in the order of their ends.
func (r *Recorder) Calls() []Call {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]Call(nil), r.calls...)
}

// serve listens at a socket, until the test ends, for what is to be passed on to
// the socket target.
func (r *Recorder) serve(t *testing.T, socket, target string) {
	t.Helper()
	conn, err := grpc.NewClient("unix://"+target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	listener, err := new(net.ListenConfig).Listen(t.Context(), "unix", socket)
	require.NoError(t, err)
	server := grpc.NewServer(grpc.WaitForHandlers(true), grpc.ForceServerCodec(rawCodec{}),
		grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error { return r.pass(stream, conn) }))
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		require.NoError(t, <-served)
	})
}

// pass passes on a call with one request and one answer, which is what all of
// kubelet's are.
func (r *Recorder) pass(stream grpc.ServerStream, conn *grpc.ClientConn) error {
	method, ok := grpc.MethodFromServerStream(stream)
	if !ok {
		return status.Error(codes.Internal, "a call without a method")
	}
	var request, reply []byte
	if err := stream.RecvMsg(&request); err != nil {
		return err
	}
	err := conn.Invoke(stream.Context(), method, &request, &reply, grpc.ForceCodec(rawCodec{}))
	if recordErr := r.record(method, request, reply, err); recordErr != nil {
		return recordErr
	}
	if err != nil {
		return err
	}
	return stream.SendMsg(&reply)
}

func (r *Recorder) record(method string, request, reply []byte, failed error) error {
	desc, err := protoregistry.GlobalFiles.FindDescriptorByName(
		protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", ".")))
	if err != nil {
		return fmt.Errorf("record a call of %s: %w", method, err)
	}
	m := desc.(protoreflect.MethodDescriptor)
	call := Call{Method: string(m.Parent().Name()) + "/" + string(m.Name())}
	if call.Request, err = decode(m.Input(), request); err != nil {
		return err
	}
	if failed != nil {
		call.Error = errorText(failed)
	} else if call.Answer, err = decode(m.Output(), reply); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, call)
	return nil
}

// decode returns a message as JSON has it.
func decode(desc protoreflect.MessageDescriptor, content []byte) (any, error) {
	m, err := message(desc)
	if err != nil {
		return nil, err
	}
	if err := proto.Unmarshal(content, m); err != nil {
		return nil, fmt.Errorf("decode %s: %w", desc.FullName(), err)
	}
	return plain(m)
}

// plain returns a message as maps, lists, strings and numbers.
func plain(m proto.Message) (any, error) {
	text, err := protojson.Marshal(m)
	if err != nil {
		return nil, err
	}
	var v any
	return v, json.Unmarshal(text, &v)
}

// message makes an empty message.
func message(desc protoreflect.MessageDescriptor) (proto.Message, error) {
	kind, err := protoregistry.GlobalTypes.FindMessageByName(desc.FullName())
	if err != nil {
		return nil, fmt.Errorf("find message %s: %w", desc.FullName(), err)
	}
	return kind.New().Interface(), nil
}

// rawCodec leaves messages as they are.
type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (rawCodec) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}

// Name is none: CRI-O tells gRPC from HTTP by the plain content type.
func (rawCodec) Name() string { return "" }
